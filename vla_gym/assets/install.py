"""Put LIBERO's assets into the cache folder: from a folder or a tar, all of them or none.

A pack is put together in a folder beside its place, checked, and renamed. What was checked is
written into the pack (``vla_gym_pack.json``), so that it can be checked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
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
    """Copy the assets from a LIBERO checkout or asset folder.

    Args:
        source: LIBERO's asset folder, or a folder with it at a usual place in it.

    Returns:
        The pack's folder.

    Raises:
        AssetError: If files are missing there, or the cache folder cannot be written.
    """
    source = Path(source).expanduser().absolute()
    if not source.is_dir():
        raise AssetError(f"{source} is not a folder: give a LIBERO checkout or its asset folder.")
    root = _complete_root(source)
    with exclusive() as parent, _scratch(parent) as scratch:
        for name in present_files(root):
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, scratch / name)
        return put_in_place(scratch, {"source": str(source)})


def install_from_tar(source: Path) -> Path:
    """Unpack the assets from a tar file (gz, bz2 and xz as well).

    Args:
        source: A tar of LIBERO's asset folder or of a whole checkout.

    Returns:
        The pack's folder.

    Raises:
        AssetError: If it is not a tar, is damaged or unsafe, lacks files, or the cache folder
            cannot be written.
    """
    source = Path(source).expanduser().absolute()
    if not source.is_file():
        raise AssetError(f"{source} does not exist: give a tar of LIBERO's assets.")
    with exclusive() as parent, _scratch(parent) as scratch:
        try:
            with tarfile.open(source) as archive:
                unpack_tar(archive, scratch / "tar")
        except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise AssetError(
                f"{source} is not an intact tar file ({error or type(error).__name__}): "
                "get it again."
            ) from error
        root = _complete_root(_unpacked_root(scratch / "tar"), str(source))
        for name in present_files(root):
            target = scratch / "pack" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (root / name).rename(target)
        return put_in_place(scratch / "pack", {"source": str(source)})


def unpack_tar(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack the folders and regular files of a tar; links and devices are left out.

    Written out because ``extractall(filter="data")`` is missing in Python 3.11.0 to 3.11.3, which
    Debian 12 has.

    Args:
        archive: Opened for reading.
        folder: Where to; made if it does not exist.

    Raises:
        tarfile.TarError: If a member lies outside of ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for member in archive:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{member.name!r} lies outside of the archive's own folder")
        target = folder / path
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
        elif content := archive.extractfile(member) if member.isfile() else None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file)


def put_in_place(staged: Path, receipt: dict[str, Any]) -> Path:
    """Check a folder with all files and make it the ``libero`` pack; the lock must be held.

    Args:
        staged: The folder, on the cache's file system; it is moved.
        receipt: Where the files came from.

    Raises:
        AssetError: If files are missing.
    """
    if missing := missing_files(staged):
        raise AssetError(f"{staged} lacks {len(missing)} files ({shorten(missing)}).")
    sums = {name: file_sha256(staged / name) for name in present_files(staged)}
    text = json.dumps({"name": "libero", **receipt, "files": sums}, indent=1)
    (staged / RECEIPT).write_text(text + "\n", encoding="utf-8")
    target = libero_folder()
    with _scratch(target.parent) as old:
        if target.exists() or target.is_symlink():
            target.rename(old / "replaced")
        staged.rename(target)
    return target


def read_receipt(root: Path) -> dict[str, Any] | None:
    """Return where a pack came from and its checksums, or None for a folder of the user's own."""
    try:
        receipt = json.loads((root / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    valid = isinstance(receipt, dict) and isinstance(receipt.get("files"), dict)
    return receipt if valid else None


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
def exclusive() -> Iterator[Path]:
    """Hold the lock on the ``libero`` pack and yield the cache folder.

    Raises:
        AssetError: If another process holds it, or the cache folder cannot be written.
    """
    parent = cache_dir()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = (parent / "libero-assets.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise _unwritable(parent, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AssetError(
                f"Another process is installing LIBERO's assets into {parent}: wait for it."
            ) from None
        try:
            yield parent
        except AssetError:
            raise
        except OSError as error:
            raise _unwritable(parent, error) from error


def _unwritable(parent: Path, error: OSError) -> AssetError:
    return AssetError(
        f"LIBERO's assets cannot be written to {parent}: {error}. Free some space, make it "
        "writable, or point the environment variable VLA_GYM_CACHE to another folder."
    )


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Yield a new folder; what is left of it afterwards is removed."""
    folder = Path(tempfile.mkdtemp(prefix=".libero-", dir=parent))
    try:
        os.chmod(folder, 0o755)  # it may become the pack itself
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unpacked_root(folder: Path) -> Path:
    """Return the folder in an unpacked tar that holds ``scenes``, however deep it lies."""
    depth = {len(path.parts): path for path in folder.rglob("scenes") if path.is_dir()}
    return depth[min(depth)].parent if depth else folder


def _complete_root(folder: Path, what: str | None = None) -> Path:
    root, missing = best_root(folder)
    if missing:
        raise AssetError(
            f"{what or root} lacks {len(missing)} of the {len(libero_files())} files that "
            f"LIBERO's tasks load ({shorten(missing)}): give a complete LIBERO checkout or its "
            "asset folder."
        )
    if pointers := lfs_pointers(root):
        raise AssetError(
            f"{what or root} holds git-LFS pointers instead of files ({shorten(pointers)}): "
            "run `git lfs pull` there."
        )
    return root
