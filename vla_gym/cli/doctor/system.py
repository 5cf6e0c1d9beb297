"""Checks of interpreter, packages, memory, files, caches and packs: all fast, in this process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from vla_gym.cli.doctor.report import Check, Status

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
    "huggingface_hub": ">=1.0",
}
OPTIONAL: dict[str, str] = {"stable-baselines3": ">=2.8", "tensorboard": ">=2.16"}
REASONS = {
    "mujoco": "from 3.4 on objects settle differently from LIBERO's data, and published policies "
    "fail on libero_spatial task 5",
    "numpy": "robosuite 1.4 and LIBERO's data need NumPy 1",
    "rlinf-libero": "other LIBERO packages ask questions at import or pull in other pins",
}
PYTHONS = ((3, 11), (3, 13))
_GB = 1e9
_MANY_GB = 20.0
_FEW_FILES = 256


def check_python() -> Check:
    """The interpreter."""
    value = f"{platform.python_version()} on {platform.platform()}"
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        mend = f"Use Python >={low},<{high} (NumPy 1 has no wheels for later ones)."
        return Check("python", "fail", value, mend)
    if sys.platform != "linux":
        return Check("python", "warn", value, "Only Linux is tested.")
    return Check("python", "ok", value)


def check_package(name: str, specifier: str, *, required: bool = True) -> Check:
    """One installed distribution against the versions that vla_gym was tried with."""
    from packaging.specifiers import SpecifierSet

    bad: Status = "fail" if required else "warn"
    reason = f"  # {REASONS[name]}" if name in REASONS else ""
    mend = f"pip install '{name}{specifier}'{reason}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if not required:
            mend = "Only for training: pip install 'vla-gym[trainers]'"
        return Check(name, bad, "not installed", mend)
    if not SpecifierSet(specifier).contains(version, prereleases=True):
        return Check(name, bad, f"{version}, expected {specifier}", mend)
    return Check(name, "ok", version)


def check_assets(pack: str) -> Check:
    """One asset pack; ``lite`` is needed and made on the spot, ``libero`` is optional."""
    from vla_gym.assets import resolve_asset_pack
    from vla_gym.assets.install import verify_pack
    from vla_gym.assets.pack import LIBERO_VARIABLE
    from vla_gym.errors import VlaGymError

    name = f"assets: {pack}"
    try:
        found = resolve_asset_pack(pack)
    except VlaGymError as error:
        if pack == "libero" and not os.environ.get(LIBERO_VARIABLE):
            mend = f"Only for LIBERO's own looks: vla-gym assets download (at most {_hub_mb()} MB)"
            return Check(name, "warn", "absent", mend)
        return Check(name, "fail" if pack == "lite" else "warn", "absent", str(error))
    value = f"{found.root} (digest {found.digest[:12]})"
    if found.name == "libero":
        problems, remarks = verify_pack(found.root)
        value = "; ".join([value, *remarks])
        if problems:
            mend = "vla-gym assets download --force"
            return Check(name, "fail", f"{value}; {'; '.join(problems)}", mend)
    return Check(name, "ok", value)


def _hub_mb() -> int:
    from vla_gym.assets.hub import HUB_REPO_SIZE

    return round(HUB_REPO_SIZE / 1e6)


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
        return Check("cache", "fail", f"{folder}: {error}", mend)
    sizes = {child.name: _size(child) / _GB for child in folder.iterdir() if child.is_dir()}
    used = sum(sizes.values())
    value = f"{folder} ({used:.1f} GB used, {free:.0f} GB free)"
    if free < 1.0:
        return Check("cache", "warn", value, "Make room: 1 GB is needed.")
    if used > _MANY_GB:
        largest = max(sizes, key=lambda name: sizes[name])
        mend = f"rm -r {folder / largest}  # {sizes[largest]:.0f} GB; made again when needed"
        return Check("cache", "warn", value, mend if largest != "libero-assets" else "")
    return Check("cache", "ok", value)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # another process may clean up meanwhile
            continue
    return total


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Shared memory: ours needs no room there, PyTorch's data loaders do."""
    name = "shared memory"
    try:
        os.close(os.memfd_create("vla-gym-doctor"))
    except OSError as error:
        mend = (
            "The vector environment needs memfd_create: allow it in the sandbox's seccomp profile."
        )
        return Check(name, "fail", f"memfd_create: {error}", mend)
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Check(name, "ok", f"memfd works; there is no {folder} (vla_gym does not use it)")
    value = f"memfd works; {folder}: {usage.total / 1e6:.0f} MB, {usage.free / 1e6:.0f} MB free"
    if usage.total <= 64 * 2**20:
        mend = (
            "vla_gym does not use /dev/shm, but PyTorch's data loaders and other vector "
            "environments do: docker run --shm-size=1g"
        )
        return Check(name, "warn", value, mend)
    return Check(name, "ok", value)


def check_files() -> Check:
    """The limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} (at most {hard})"
    if soft < _FEW_FILES:
        return Check("open files", "warn", value, "ulimit -n 4096")
    return Check("open files", "ok", value)


def check_cores() -> Check:
    """CPU cores that this process may use, and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Check("cores", "ok", f"{cores} cores, {pages * size / 1e9:.0f} GB memory")
