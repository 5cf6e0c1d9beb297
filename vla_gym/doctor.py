"""``vla-gym doctor``: what this machine has, what is missing, and the exact mend.

Every check is one function that returns a :class:`Check` and never raises.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

#: Distribution name -> what vla_gym needs of it (the same pins as pyproject.toml).
REQUIREMENTS: dict[str, str] = {
    "mujoco": ">=3.3,<3.4",
    "robosuite": ">=1.4,<1.5",
    "rlinf-libero": "==0.1.3",
    "gymnasium": ">=1.4,<2",
    "numpy": "<2",
    "numba": ">=0.60",
    "torch": ">=2.5",
    "transformers": ">=5.18",
}
OPTIONAL: dict[str, str] = {"stable-baselines3": ">=2.8", "tensorboard": ">=2.16"}
APT_PACKAGES = "libegl1 libgl1-mesa-dri libgl1 libglib2.0-0"
APT_LINE = f"apt-get install -y {APT_PACKAGES}"
GL_TIMEOUT = 60.0  # seconds; a first llvmpipe start takes about one

# Runs in a process of its own: a broken driver may abort or hang the process that asks it.
_GL_PROBE = """
import mujoco.egl
context = mujoco.egl.GLContext(16, 16)
context.make_current()
from OpenGL import GL
print(GL.glGetString(GL.GL_RENDERER).decode(), "|", GL.glGetString(GL.GL_VERSION).decode())
context.free()
"""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was looked at.
        status: ``"ok"``, ``"warn"`` (works, but not all of it) or ``"fail"``.
        value: What was found.
        mend: What to do about it; empty when ok.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    mend: str = ""


def check_python() -> Check:
    """The interpreter."""
    return Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def check_package(name: str, specifier: str, *, required: bool = True) -> Check:
    """One installed distribution against the versions that vla_gym was tried with."""
    from packaging.specifiers import SpecifierSet

    bad: Literal["warn", "fail"] = "fail" if required else "warn"
    mend = f"pip install '{name}{specifier}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, bad, "not installed", mend)
    if not SpecifierSet(specifier).contains(version, prereleases=True):
        return Check(name, bad, f"{version}, expected {specifier}", mend)
    return Check(name, "ok", version)


def check_gl(timeout: float = GL_TIMEOUT) -> Check:
    """Off-screen OpenGL: the GL_RENDERER string, or why there is none."""
    environment = {**os.environ, "MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _GL_PROBE],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Check("gl", "fail", f"no answer within {timeout:.0f} s", _gl_mend())
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return Check("gl", "fail", f"no off-screen OpenGL ({last})", _gl_mend())
    return Check("gl", "ok", probe.stdout.strip().splitlines()[-1])


def _gl_mend() -> str:
    if shutil.which("apt-get"):
        prefix = "" if os.geteuid() == 0 else "sudo "
        return f"{prefix}{APT_LINE}"
    return f"Install EGL and a driver for it (Debian: {APT_LINE})."


def check_assets(pack: str) -> Check:
    """One asset pack; ``lite`` is needed and made on the spot, ``libero`` is optional."""
    from vla_gym.assets import resolve_asset_pack
    from vla_gym.errors import VlaGymError

    name = f"assets: {pack}"
    try:
        found = resolve_asset_pack(pack)
    except VlaGymError as error:
        return Check(name, "fail" if pack == "lite" else "warn", "absent", str(error))
    return Check(name, "ok", f"{found.root} (digest {found.digest[:12]})")


def check_weights(name: str) -> Check:
    """The shipped weights of a VLA and of its RL token, against their checksums."""
    from vla_gym.errors import WeightsError
    from vla_gym.vla.files import resolve_weights, verify_checksums

    title = f"weights: {name}"
    try:
        folders = [resolve_weights(name), resolve_weights(name, suffix="-rl-token")]
        for folder in folders:
            verify_checksums(folder)
    except WeightsError as error:
        return Check(title, "fail", "absent or corrupt", str(error))
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    return Check(title, "ok", f"{folders[0].name}, {folders[1].name} ({size / 1e6:.1f} MB)")


def check_cache() -> Check:
    """The cache folder: where, writable, how much space is left."""
    from vla_gym.assets import cache_dir

    folder = Path(cache_dir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free / 1e9
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        return Check("cache", "fail", f"{folder}: {error}", "Set VLA_GYM_CACHE to another folder.")
    if not writable:
        return Check(
            "cache", "fail", f"{folder}: not writable", "Set VLA_GYM_CACHE to another folder."
        )
    if free < 1.0:
        return Check("cache", "warn", f"{folder}: {free:.1f} GB free", "Make room: 1 GB is needed.")
    return Check("cache", "ok", f"{folder} ({free:.0f} GB free)")


def check_cores() -> Check:
    """CPU cores that this process may use, and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Check("cores", "ok", f"{cores} cores, {pages * size / 1e9:.0f} GB memory")


def check_cuda() -> Check:
    """The accelerator; none is needed."""
    try:
        import torch
    except Exception as error:  # a broken torch may raise anything, e.g. OSError
        return Check("cuda", "fail", f"torch cannot be imported: {error}", "Install torch again.")
    if not torch.cuda.is_available():
        return Check("cuda", "ok", "none (not needed by the embedded VLA)")
    return Check("cuda", "ok", torch.cuda.get_device_name(0))


def run_checks() -> list[Check]:
    """Run every check in the order in which the report shows them.

    Returns:
        One :class:`Check` each; a check that breaks is reported as failed.
    """
    checks: list[tuple[str, Callable[[], Check]]] = [("python", check_python)]
    for name, spec in REQUIREMENTS.items():
        checks.append((name, partial(check_package, name, spec)))
    for name, spec in OPTIONAL.items():
        checks.append((name, partial(check_package, name, spec, required=False)))
    checks += [
        ("gl", check_gl),
        ("cuda", check_cuda),
        ("assets: lite", partial(check_assets, "lite")),
        ("assets: libero", partial(check_assets, "libero")),
        ("weights: mini", partial(check_weights, "mini")),
        ("cache", check_cache),
        ("cores", check_cores),
    ]
    results = []
    for name, check in checks:
        try:
            results.append(check())
        except Exception as error:  # the report must come out whatever is broken
            detail = f"{type(error).__name__}: {error}"
            results.append(Check(name, "fail", detail, "Install vla-gym again."))
    return results


def as_json(checks: list[Check]) -> dict[str, Any]:
    """Return the report as plain data: ``{"ok": bool, "checks": [{name, status, ...}]}``."""
    return {
        "ok": all(check.status != "fail" for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def print_report(checks: list[Check]) -> None:
    """Show the report as a table, then the mends."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(title="vla-gym doctor", title_justify="left", show_edge=False)
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = Text(check.status, style=colours[check.status])
        table.add_row(check.name, mark, Text(check.value))
    console = Console()
    console.print(table)
    for check in checks:
        if check.mend:
            line = Text(f"{check.name}: ", style=colours[check.status])
            console.print(line.append(check.mend, style="default"), soft_wrap=True)
