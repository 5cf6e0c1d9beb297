"""Where this package keeps what it can make again: generated assets and compiled scenes."""

from __future__ import annotations

import os
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
