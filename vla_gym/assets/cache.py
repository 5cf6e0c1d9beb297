"""Where this package keeps what it can make again: generated assets and compiled scenes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "VLA_GYM_CACHE"


def cache_dir() -> Path:
    """Return the cache folder (not created here).

    ``VLA_GYM_CACHE`` overrides the platform's user cache folder. Everything below it may be
    deleted at any time.
    """
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser().absolute()
    return platformdirs.user_cache_path("vla-gym")


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
