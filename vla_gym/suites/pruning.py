"""Removes compiled scenes that nobody has used for a while, such as those of old versions.

A process that uses a scene holds a shared lock on its manifest and sets the manifest's time, so
what runs, or ran lately, stays: in another virtual environment the same cache may well serve an
older version.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
UNUSED_DAYS = 30

# Manifests of the scenes that this process uses, by device and inode. Bare descriptors: they stay
# open and locked until the process ends, whatever the interpreter clears away before.
_in_use: dict[tuple[int, int], int] = {}


def mark_used(folder: Path) -> None:
    """Keep a scene from being removed while this process lives, and note when it was used.

    A cache that cannot be written is not pruned either: nothing is raised.
    """
    with contextlib.suppress(OSError):
        path = folder / MANIFEST
        status = path.stat()
        key = (status.st_dev, status.st_ino)
        if key not in _in_use:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # somebody is removing it
                os.close(descriptor)
                raise
            _in_use[key] = descriptor
        os.utime(path)


def prune(scenes: Path, unused_days: float = UNUSED_DAYS) -> list[str]:
    """Remove scenes that nobody has used for a while, and what killed builds left behind.

    Args:
        scenes: Folder of all compiled scenes.
        unused_days: Scenes that were used within this time stay, and so do those in use.

    Returns:
        The names of the folders that were removed.
    """
    removed = []
    oldest = time.time() - unused_days * 86400
    for folder in sorted(path for path in scenes.iterdir() if path.is_dir()):
        try:
            manifest = folder / MANIFEST
            used = manifest if manifest.exists() else folder
            if used.stat().st_mtime < oldest and _remove(folder):
                removed.append(folder.name)
        except OSError as error:  # another process is at it, or it is not ours to remove
            logger.debug("Old scene %s stays: %s", folder, error)
    if removed:
        logger.info("Removed %d unused compiled scenes from %s.", len(removed), scenes)
    return removed


def _remove(folder: Path) -> bool:
    """Remove a folder unless a process uses it; readers see all of it or nothing."""
    with contextlib.ExitStack() as stack:
        manifest = folder / MANIFEST
        if manifest.exists():
            file = stack.enter_context(manifest.open("rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        doomed = folder.with_name(f".{folder.name.lstrip('.')}-old-{os.getpid()}")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return True
