"""Put LIBERO's assets into the cache folder: from a folder, all of them or none.

A pack is put together in a folder beside its place, checked, and renamed. What was checked is
written into the pack (``vla_gym_pack.json``), so that it can be checked again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vla_gym.assets.cache import cache_dir
from vla_gym.assets.manifest import (
    altered_mjcf,
    best_root,
    damaged_files,
    file_sha256,
    lfs_pointers,
    libero_files,
    missing_files,
    present_files,
    shorten,
)
from vla_gym.errors import AssetError

RECEIPT = "vla_gym_pack.json"


def libero_folder() -> Path:
    """Return where this package keeps LIBERO's assets (not created here)."""
    return cache_dir() / "libero-assets"


def install_from_dir(source: Path) -> Path:
    """Copy the assets from a LIBERO checkout or asset folder; return the pack's folder.

    Raises:
        AssetError: If files are missing there, or the cache folder cannot be written.
    """
    source = Path(source).expanduser().absolute()
    if not source.is_dir():
        raise AssetError(f"{source} is not a folder: give a LIBERO checkout or its asset folder.")
    root = _complete_root(source)
    with writing(), _scratch() as scratch:
        for name in present_files(root):
            target = scratch / "pack" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target)
        return put_in_place(scratch / "pack", str(source))


def put_in_place(staged: Path, source: str) -> Path:
    """Make a folder with all files the ``libero`` pack, in one rename.

    Args:
        staged: The folder, on the cache's file system; it is moved.
        source: Where the files came from.
    """
    sums = {name: file_sha256(staged / name) for name in present_files(staged)}
    text = json.dumps({"source": source, "files": sums}, indent=1)
    (staged / RECEIPT).write_text(text + "\n", encoding="utf-8")
    target = libero_folder()
    with _scratch() as old:
        if target.exists() or target.is_symlink():
            target.rename(old / "replaced")
        staged.rename(target)
    return target


def read_receipt(root: Path) -> dict[str, Any] | None:
    """Return where a pack came from and its checksums, or None for a folder of the user's own."""
    try:
        receipt: dict[str, Any] = json.loads((root / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return receipt


def verify_pack(root: Path) -> tuple[list[str], list[str]]:
    """Check every file of a ``libero`` pack.

    Returns:
        Problems (the pack must not be used) and remarks, one line each.
    """
    if missing := missing_files(root):
        return [f"{len(missing)} files are missing: {shorten(missing)}"], []
    problems, remarks = [], []
    if pointers := lfs_pointers(root):
        problems.append(f"{len(pointers)} files are git-LFS pointers: {shorten(pointers)}")
    receipt = read_receipt(root)
    if receipt is None:
        remarks.append("no checksums of the meshes and textures: not put there by vla-gym")
    elif damaged := damaged_files(root, receipt["files"]):
        problems.append(f"{len(damaged)} files have changed: {shorten(damaged)}")
    if altered := altered_mjcf(root):
        remarks.append(
            f"{len(altered)} MJCF files are not LIBERO's own ({shorten(altered)}): "
            "physics may differ from published results"
        )
    return problems, remarks


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turn what goes wrong while the cache folder is written into an :class:`AssetError`."""
    try:
        yield
    except AssetError:
        raise
    except OSError as error:
        raise AssetError(
            f"LIBERO's assets cannot be written to {cache_dir()}: {error}. Free some space, make "
            "it writable, or point the environment variable VLA_GYM_CACHE to another folder."
        ) from error


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a new folder in the cache; what is left of it afterwards is removed."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".libero-", dir=cache_dir()) as folder:
        yield Path(folder)


def _complete_root(folder: Path) -> Path:
    """Return where in a folder all assets are."""
    root, missing = best_root(folder)
    if missing:
        raise AssetError(
            f"{root} lacks {len(missing)} of the {len(libero_files())} files that "
            f"LIBERO's tasks load ({shorten(missing)}): give a complete LIBERO checkout or its "
            "asset folder."
        )
    if pointers := lfs_pointers(root):
        raise AssetError(
            f"{root} holds git-LFS pointers instead of files ({shorten(pointers)}): "
            "run `git lfs pull` there."
        )
    return root
