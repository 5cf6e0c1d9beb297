"""What a check returns, and how it asks a probe that runs in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

Status = Literal["ok", "warn", "fail"]

#: Seconds a probe may take; compiling the scene, and the first time the simulation, included.
PROBE_TIMEOUT = 120.0
ROOT = Path(__file__).resolve().parents[3]
_PROBES = Path(__file__).with_name("probes.py")


class Finding(NamedTuple):
    """What a check found.

    Attributes:
        status: ``"ok"``, ``"warn"`` (works, but not all of it, or slowly) or ``"fail"``.
        value: What was found.
        mend: What to do about it; empty when ok.
    """

    status: Status
    value: str
    mend: str = ""


class Answer(NamedTuple):
    """What a probe said: its JSON object, or None and why there is none, in one line."""

    data: dict[str, Any] | None
    trouble: str = ""


#: Runs a probe by name and arguments; see :func:`ask`.
Ask = Callable[..., Answer]


def ask(probe: str, *arguments: str, timeout: float = PROBE_TIMEOUT) -> Answer:
    """Run a probe of ``probes.py`` in a process of its own.

    Args:
        probe: ``gl``, ``imports``, ``settle`` or ``speed``.
        arguments: The asset pack of the last two.
        timeout: Deadline in seconds; then the whole process group is killed.
    """
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    more = {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, "-P", str(_PROBES), probe, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {timeout:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        data = json.loads(lines[-1])
        failed = set(data) == {"error"}
        return Answer(None, data["error"]) if failed else Answer(data)
    if process.returncode < 0:
        return Answer(None, f"killed by {signal.Signals(-process.returncode).name}")
    last = [line.strip() for line in error.splitlines() if line.strip()][-1:]
    return Answer(None, last[0][:300] if last else f"exit code {process.returncode}")
