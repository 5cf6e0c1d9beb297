"""What must be right before numba and MuJoCo are imported: else they fail with riddles."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from vla_gym.assets.cache import CACHE_VARIABLE, cache_dir, writable
from vla_gym.errors import ConfigError, RenderError


def check_egl() -> None:
    """Make sure that MuJoCo can be imported with the OpenGL backend that the user named.

    With ``MUJOCO_GL=egl`` it loads libEGL at import; without that variable only when it draws.

    Raises:
        RenderError: If libEGL is named but missing.
    """
    if os.environ.get("MUJOCO_GL", "").lower() != "egl" or "mujoco" in sys.modules:
        return
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError as error:
        raise RenderError(
            f"MUJOCO_GL=egl is set, but EGL is missing ({error}). On Debian or Ubuntu: apt-get "
            "install -y libegl1 libgl1-mesa-dri. Without images, unset MUJOCO_GL."
        ) from error


def ensure_numba_cache(package: Path) -> None:
    """Make sure that numba finds a folder for compiled code; it fails at import where it has none.

    It takes ``__pycache__`` beside the source, so nothing is done unless that is read-only.

    Args:
        package: Folder with the functions that numba compiles.

    Raises:
        ConfigError: If the cache folder cannot be written either.
    """
    import numba

    config: Any = numba.config
    if config.CACHE_DIR or writable(package / "__pycache__"):
        return
    folder = cache_dir() / "numba"
    if not writable(folder):
        raise ConfigError(
            f"Compiled code can be stored neither in {package} nor in {folder}: point the "
            f"environment variable {CACHE_VARIABLE} to a folder that is writable."
        )
    config.CACHE_DIR = str(folder)
