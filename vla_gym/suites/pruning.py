"""Removes compiled scenes that nobody needs: of old versions, and not used for a while.

A process that uses a scene holds a shared lock on its manifest and sets the manifest's time, so
what runs, or ran lately, stays: in another virtual environment the same cache may well serve an
older version.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
UNUSED_DAYS = 30
# What the present installation would write into every manifest.
_VERSION_FIELDS = ("schema", "compiler", "versions", "machine")

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


def prune(scenes: Path, identity: Mapping[str, Any], unused_days: float = UNUSED_DAYS) -> list[str]:
    """Remove scenes that the present installation would not use, unless they are in use.

    Args:
        scenes: Folder of all compiled scenes.
        identity: Identity of a scene that was just built: it says what is present.
        unused_days: Scenes that were used within this time stay.

    Returns:
        The names of the folders that were removed.
    """
    removed = []
    oldest = time.time() - unused_days * 86400
    for folder in sorted(scenes.iterdir()):
        try:
            if _is_old(folder, identity, oldest) and _remove(folder):
                removed.append(folder.name)
        except OSError as error:  # another process is at it, or it is not ours to remove
            logger.debug("Old scene %s stays: %s", folder, error)
    if removed:
        logger.info("Removed %d compiled scenes of old versions from %s.", len(removed), scenes)
    return removed


def _is_old(folder: Path, identity: Mapping[str, Any], oldest: float) -> bool:
    if not folder.is_dir():
        return False
    if folder.name.startswith("."):  # left by a build that was killed
        return folder.stat().st_mtime < oldest
    manifest = folder / MANIFEST
    if not manifest.exists():
        return folder.stat().st_mtime < oldest
    return manifest.stat().st_mtime < oldest and not _is_present(manifest, identity)


def _is_present(manifest: Path, identity: Mapping[str, Any]) -> bool:
    """Tell whether the present installation could ask for a scene."""
    try:
        theirs = json.loads(manifest.read_text(encoding="utf-8"))["identity"]
        if any(theirs[field] != identity[field] for field in _VERSION_FIELDS):
            return False
        if theirs["scene"] == identity["scene"] and theirs["tasks"] != identity["tasks"]:
            return False
        return bool(theirs["pack"] != identity["pack"]) or bool(
            theirs["pack_digest"] == identity["pack_digest"]
        )
    except (ValueError, KeyError, TypeError):
        return False


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
