"""What a report says about the machine and the software that it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from vla_gym.cli.bench.procfs import available_memory_mb
from vla_gym.cli.doctor import check_gl

_PACKAGES = ("mujoco", "robosuite", "rlinf-libero", "gymnasium", "numpy", "numba")


def versions() -> dict[str, str]:
    """Return the versions that speed depends on."""
    from vla_gym import __version__

    found = {"vla-gym": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, OpenGL renderer and the load of the last minute."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6),
        "available_mb": round(available_memory_mb()),
        "platform": platform.platform(),
        "gl": check_gl().value,
        "load": os.getloadavg()[0],
    }


def today() -> str:
    """Return the date and time in UTC, to the minute."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
