"""Where this package keeps what it can make again: generated assets and compiled scenes."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "VLA_GYM_CACHE"


def cache_dir() -> Path:
    """Return the cache folder (not created here).

    ``VLA_GYM_CACHE`` overrides the platform's user cache folder. Everything below it may be
    deleted at any time; what ``bddl/`` held, a user's own tasks, then has to be given again.
    """
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(os.path.expanduser(override)).absolute()
    return platformdirs.user_cache_path("vla-gym")


def make_shared(folder: Path) -> None:
    """Make a folder of the cache; whom the cache is open to may write there: users may share one.

    Raises:
        OSError: If it cannot be made.
    """
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.parent.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        with contextlib.suppress(PermissionError):  # another process was faster, of another user
            folder.chmod(mode)


def writable(folder: Path) -> bool:
    """Tell whether files can be made in a folder, which is created if need be.

    It is tried out: permissions say nothing about a read-only file system, nor to root.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
