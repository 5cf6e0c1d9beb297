"""``vla-gym doctor``: what this machine has, what is missing, and the exact mend.

:data:`CHECKS` is the list. What may crash or hang runs in a process of its own, see
:func:`~vla_gym.cli.probes.ask`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vla_gym.cli import known_episode
from vla_gym.cli.probes import ROOT, ProbeError, ProbeTimeout, ask

APT_LINE = "apt-get install -y libegl1 libgl1-mesa-dri libgl1 libglib2.0-0"
# How far in cm the bowl of libero_spatial task 5 slides while official state 0 settles; all states
# alike to 1e-6. Upstream's own environment with the real meshes: 1.460 with mujoco 3.3.7, 3.69
# with 3.8.1. On the lite pack, whose ramekin is level: 0.0005.
SETTLED_CM = {"libero": 1.46, "lite": 0.0}
SETTLED_TOLERANCE_CM = 0.5
_SOFTWARE = ("llvmpipe", "softpipe", "swrast", "swiftshader")
_REASONS = {"mujoco": "from 3.4 on objects settle differently from LIBERO's data"}


class Finding(NamedTuple):
    """What a check found; ``"warn"``: works, but not all of it, or slowly. No mend when ok."""

    status: Literal["ok", "warn", "fail"]
    value: str
    mend: str = ""


def check_packages(extra: str) -> Finding:
    """The interpreter and the packages against what vla-gym declares; an extra is optional."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(line) for line in importlib.metadata.requires("vla-gym") or ()]
    except importlib.metadata.PackageNotFoundError:
        return Finding("warn", "vla-gym itself is not installed", f"pip install -e {ROOT}")
    fine, wrong, mends = [f"Python {platform.python_version()}"], [], []
    chosen = [r for r in declared if (extra in str(r.marker) if extra else not r.marker)]
    for wanted in chosen:
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is not installed")
        else:
            if wanted.specifier.contains(version, prereleases=True):
                fine.append(f"{wanted.name} {version}")
                continue
            wrong.append(f"{wanted.name} {version}, expected {wanted.specifier}")
        reason = f"  # {_REASONS[wanted.name]}" if wanted.name in _REASONS else ""
        mends.append(f"pip install '{wanted.name}{wanted.specifier}'{reason}")
    if not wrong:
        return Finding("ok", ", ".join(fine))
    if extra:
        return Finding("warn", "; ".join(wrong), f"pip install 'vla-gym[{extra}]', for training")
    return Finding("fail", "; ".join(wrong), "\n".join(mends))


def check_cache() -> Finding:
    """The cache folder: where, writable, how much space is left."""
    from vla_gym.assets.cache import cache_dir, writable

    folder = cache_dir()
    if not writable(folder):
        mend = f"Make {folder} writable, or: export VLA_GYM_CACHE=/a/folder/with/10/GB"
        return Finding("fail", f"{folder} cannot be written", mend)
    free = shutil.disk_usage(folder).free / 1e9
    value = f"{folder} ({free:.0f} GB free)"
    return Finding("warn", value, "Make room.") if free < 1 else Finding("ok", value)


def check_assets(pack: str) -> Finding:
    """One asset pack: ``lite`` is made on the spot, ``libero`` comes with the wheels."""
    from vla_gym.assets import resolve_asset_pack
    from vla_gym.errors import AssetError

    try:
        found = resolve_asset_pack(pack)
    except AssetError as error:
        return Finding("fail" if pack == "lite" else "warn", "absent", str(error))
    return Finding("ok", f"{found.root} (digest {found.digest[:12]})")


def check_limits() -> Finding:
    """CPU cores that this process may use, memory, open files, anonymous shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    cores = len(os.sched_getaffinity(0))
    value = f"{cores} cores, {memory:.0f} GB memory, {soft} open files (at most {hard})"
    try:
        os.close(os.memfd_create("vla-gym-doctor"))
    except OSError as error:
        mend = "The vector environment needs memfd_create: allow it in the seccomp profile."
        return Finding("fail", f"{value}; memfd_create: {error}", mend)
    return Finding("warn", value, "ulimit -n 4096") if soft < 256 else Finding("ok", value)


def check_gl() -> Finding:
    """Off-screen OpenGL: what draws, or why nothing does."""
    has_gpu = Path("/dev/nvidiactl").exists()
    driver = (
        "There is an NVIDIA GPU: if it is to draw, install the driver's graphics part "
        "(libnvidia-gl-<version>); in a container: --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all."
    )
    try:
        renderer: str = ask("gl")
    except ProbeError as error:
        mend = f"{APT_LINE}\n{driver}" if has_gpu else APT_LINE
        if "MUJOCO_EGL_DEVICE_ID" in os.environ:
            mend = f"Unset MUJOCO_EGL_DEVICE_ID, or: {mend}"
        return Finding("fail", f"no off-screen OpenGL ({error})", mend)
    if not any(name in renderer.lower() for name in _SOFTWARE):
        return Finding("ok", renderer)
    mend = "No GPU is needed. Images are cheap with assets='lite', visual_profile='fast', chunks."
    if os.environ.get("LP_NUM_THREADS", "0") != "0":
        mend = "Unset LP_NUM_THREADS: threads of Mesa's renderer damage their process now and then."
    return Finding("warn", f"{renderer}: drawn on the CPU", driver if has_gpu else mend)


def check_imports() -> Finding:
    """Torch and transformers import; which CUDA devices there are."""
    try:
        found = ask("imports")
    except ProbeTimeout:
        raise
    except ProbeError as error:
        mend = "pip install --force-reinstall torch transformers"
        if "torchvision" in str(error):
            mend = "pip uninstall -y torchvision  # it does not fit torch, and is not needed here"
        return Finding("fail", str(error), mend)
    cuda = ", ".join(found["cuda"]) or "none (not needed by the embedded VLA)"
    return Finding("ok", f"{found['versions']}, CUDA: {cuda}")


def check_settle() -> Finding:
    """Does the bowl of libero_spatial task 5 settle where LIBERO's data has it?"""
    pack = "libero" if check_assets("libero").status == "ok" else "lite"
    cm, wanted = ask("settle", pack), SETTLED_CM[pack]
    value = f"bowl of libero_spatial task 5 slides {cm:.2f} cm, expected {wanted:.2f} ({pack} pack)"
    if abs(cm - wanted) <= SETTLED_TOLERANCE_CM:
        return Finding("ok", value)
    mend = "Success rates are not comparable: pip install 'mujoco>=3.3,<3.4', run this again."
    return Finding("fail", value, mend)


def check_protocol(protocol: str) -> Finding:
    """Does a known episode go, and look, as it should under an evaluation protocol?"""
    pack = "libero" if check_assets("libero").status == "ok" else "lite"
    wanted = json.loads(known_episode.KNOWN.read_text(encoding="utf-8"))[pack][protocol]
    same, text = known_episode.judge(ask("known", protocol, pack), wanted)
    value = f"goal 8 state 0 ({pack} pack): {text}"
    if same and pack == "libero":
        return Finding("ok", value)
    if same:
        mend = "The lite pack is not LIBERO: checkpoints of others need --assets libero."
        return Finding("warn", value, mend)
    mend = "Checkpoints see another world here. Mend what is marked above, unset what changes it."
    return Finding("fail", value, mend)


#: Name of a check, the check, whether it takes seconds.
CHECKS: tuple[tuple[str, Callable[[], Finding], bool], ...] = (
    ("packages", lambda: check_packages(""), False),
    ("trainers", lambda: check_packages("trainers"), False),
    ("cache", check_cache, False),
    ("assets: lite", lambda: check_assets("lite"), False),
    ("assets: libero", lambda: check_assets("libero"), False),
    ("limits", check_limits, False),
    ("gl", check_gl, False),
    ("imports", check_imports, True),
    ("settle", check_settle, True),
)


def run_checks(*, quick: bool = False, protocol: str | None = None) -> dict[str, Finding]:
    """Run the checks, with ``quick`` only the fast ones; one that breaks is reported as failed.

    Args:
        quick: Leave out those that take seconds.
        protocol: Also play a known episode as this evaluation protocol has it.
    """
    findings = {}
    checks = list(CHECKS)
    if protocol is not None:
        checks.append((f"protocol: {protocol}", lambda: check_protocol(protocol), False))
    for name, check, is_slow in checks:
        if quick and is_slow:
            continue
        try:
            findings[name] = check()
        except ProbeError as error:
            mend = "Mend what is marked above, then run this again."
            if isinstance(error, ProbeTimeout):
                mend = "Run this again when the machine is less busy: a first use compiles, too."
            findings[name] = Finding("fail", str(error), mend)
        except Exception as error:  # the report must come out whatever is broken
            value = f"{type(error).__name__}: {error}"
            findings[name] = Finding("fail", value, "Install vla-gym again.")
    return findings


def as_json(findings: Mapping[str, Finding]) -> dict[str, Any]:
    """Return the report as plain data: ``{"ok": bool, "checks": [{name, status, ...}]}``."""
    checks = [{"name": name, **finding._asdict()} for name, finding in findings.items()]
    return {"ok": all(check["status"] != "fail" for check in checks), "checks": checks}


def print_report(findings: Mapping[str, Finding]) -> None:
    """Show the findings as a table, then the mends, then one line that sums up."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table("check", "", "found", title="vla-gym doctor", show_edge=False)
    for name, finding in findings.items():
        mark = Text(finding.status, style=colours[finding.status])
        table.add_row(name, mark, Text(finding.value, overflow="fold"))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, finding in findings.items():
        if finding.mend:
            line = Text(f"\n{name}: ", style=colours[finding.status])
            console.print(line.append(finding.mend, style="default"), soft_wrap=True)
    failed, warned = (sum(f.status == s for f in findings.values()) for s in ("fail", "warn"))
    verdict = f"{failed} to mend" if failed else "vla-gym works here"
    console.print(f"\n{verdict}; {warned} warning{'s' * (warned != 1)}.")
