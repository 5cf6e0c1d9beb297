"""Checks of interpreter, packages, files, caches, packs and memory: all fast, in this process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from vla_gym.cli.doctor.asking import ROOT, Ask, Finding

PYTHONS = ((3, 11), (3, 13))
_REASONS = {
    "mujoco": "from 3.4 on objects settle differently from LIBERO's data, and published policies "
    "fail on libero_spatial task 5",
    "numpy": "robosuite 1.4 and LIBERO's data need NumPy 1",
    "rlinf-libero": "other LIBERO packages ask questions at import or pull in other pins",
}
_GB, _MANY_GB, _FEW_FILES = 1e9, 20.0, 256


def check_python(_: Ask) -> Finding:
    """The interpreter."""
    value = f"{platform.python_version()} on {platform.platform()}"
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        mend = f"Use Python >={low},<{high} (NumPy 1 has no wheels for later ones)."
        return Finding("fail", value, mend)
    return Finding("ok", value) if sys.platform == "linux" else Finding("warn", value)


def check_packages(extra: str | None, _: Ask) -> Finding:
    """The installed distributions against the versions that vla_gym declares.

    Args:
        extra: None for what is always needed, else the extra, which is optional.
    """
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(line) for line in importlib.metadata.requires("vla-gym") or ()]
    except importlib.metadata.PackageNotFoundError:
        return Finding("warn", "vla-gym itself is not installed", f"pip install -e {ROOT}")
    kind = "" if extra is None else extra
    wanted = [r for r in declared if (extra is None) == (r.marker is None)]
    wanted = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": kind})]
    fine, wrong, mends = [], [], []
    for requirement in wanted:
        name = requirement.name
        reason = f"  # {_REASONS[name]}" if name in _REASONS else ""
        mend = f"pip install '{name}{requirement.specifier}'{reason}"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            mends.append(mend)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            fine.append(f"{name} {version}")
        else:
            wrong.append(f"{name} {version}, expected {requirement.specifier}")
            mends.append(mend)
    if not wrong:
        return Finding("ok", ", ".join(fine))
    if extra is None:
        return Finding("fail", "; ".join(wrong), "\n".join(mends))
    return Finding("warn", "; ".join(wrong), f"Only for training: pip install 'vla-gym[{extra}]'")


def check_cache(_: Ask) -> Finding:
    """The cache folder: where, writable, how large, how much space is left."""
    from vla_gym.assets import cache_dir

    folder = Path(cache_dir())
    mend = f"Make {folder} writable, or: export VLA_GYM_CACHE=/a/folder/with/10/GB"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Trying it is the only test: root may write anywhere but on a read-only file system.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
        free = shutil.disk_usage(folder).free / _GB
    except OSError as error:
        return Finding("fail", f"{folder}: {error}", mend)
    sizes = {child.name: _size(child) / _GB for child in folder.iterdir() if child.is_dir()}
    used = sum(sizes.values())
    value = f"{folder} ({used:.1f} GB used, {free:.0f} GB free)"
    if free < 1.0:
        return Finding("warn", value, "Make room: 1 GB is needed.")
    if used > _MANY_GB:
        largest = max(sizes, key=lambda name: sizes[name])
        mend = f"rm -r {folder / largest}  # {sizes[largest]:.0f} GB; made again when needed"
        return Finding("warn", value, mend if largest != "libero-assets" else "")
    return Finding("ok", value)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may clean up meanwhile
            total += path.lstat().st_size
    return total


def check_assets(pack: str, _: Ask) -> Finding:
    """One asset pack; ``lite`` is needed and made on the spot, ``libero`` is optional."""
    from vla_gym.assets import resolve_asset_pack
    from vla_gym.assets.install import verify_pack
    from vla_gym.assets.pack import LIBERO_VARIABLE
    from vla_gym.errors import VlaGymError

    try:
        found = resolve_asset_pack(pack)
    except VlaGymError as error:
        if pack == "libero" and not os.environ.get(LIBERO_VARIABLE):
            return Finding("warn", "absent", "Only for LIBERO's own looks: vla-gym assets download")
        return Finding("fail" if pack == "lite" else "warn", "absent", str(error))
    value = f"{found.root} (digest {found.digest[:12]})"
    if found.name == "libero":
        problems, remarks = verify_pack(found.root)
        value = "; ".join([value, *remarks, *problems])
        if problems:
            return Finding("fail", value, "vla-gym assets download --force")
    return Finding("ok", value)


def check_weights(name: str, _: Ask) -> Finding:
    """The shipped weights of a VLA and of its RL token, against their checksums."""
    from vla_gym.errors import WeightsError
    from vla_gym.vla.files import resolve_weights, verify_checksums

    try:
        folders = [resolve_weights(name), resolve_weights(name, suffix="-rl-token")]
        for folder in folders:
            verify_checksums(folder)
    except WeightsError as error:
        return Finding("fail", "absent or corrupt", str(error))
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    return Finding("ok", f"{folders[0].name}, {folders[1].name} ({size / 1e6:.1f} MB)")


def check_shared_memory(_: Ask, folder: Path = Path("/dev/shm")) -> Finding:
    """Shared memory: ours needs no room there, PyTorch's data loaders do."""
    try:
        os.close(os.memfd_create("vla-gym-doctor"))
    except OSError as error:
        mend = (
            "The vector environment needs memfd_create: allow it in the sandbox's seccomp profile."
        )
        return Finding("fail", f"memfd_create: {error}", mend)
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Finding("ok", f"memfd works; there is no {folder} (vla_gym does not use it)")
    value = f"memfd works; {folder}: {usage.total / 1e6:.0f} MB, {usage.free / 1e6:.0f} MB free"
    if usage.total <= 64 * 2**20:
        mend = (
            "vla_gym does not use /dev/shm, but PyTorch's data loaders and other vector "
            "environments do: docker run --shm-size=1g"
        )
        return Finding("warn", value, mend)
    return Finding("ok", value)


def check_limits(_: Ask) -> Finding:
    """Open files, CPU cores that this process may use, memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    cores = len(os.sched_getaffinity(0))
    value = f"{cores} cores, {memory:.0f} GB memory, {soft} open files (at most {hard})"
    return Finding("warn", value, "ulimit -n 4096") if soft < _FEW_FILES else Finding("ok", value)
