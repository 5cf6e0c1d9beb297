"""Whether a process whose images are drawn in software may be forked, OpenGL contexts and all.

A context of Mesa's software renderer is memory and code of one process, which a fork copies like
anything else. Not so threads that draw, and memory that parent and child would both write to.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

# Mesa's thread for its cache of compiled shaders: it sleeps unless something new was compiled.
_CACHE_THREAD = "disk$"
_CACHE_FILE = "mesa_shader_cache"  # made to be shared by processes
_PATIENCE_S = 10.0


def obstacle() -> str | None:
    """Say what forbids a fork of this process with its OpenGL contexts; None: nothing does.

    Waits a little for the cache's thread to have nothing to do.
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in maps.splitlines():
        if "rw-s" in line.split()[1] and _CACHE_FILE not in line:
            return f"shared memory: {line.split()[-1]}"
    end = time.monotonic() + _PATIENCE_S
    while True:
        threads = _threads()
        busy = [name for name, state in threads if _CACHE_THREAD not in name or state != "S"]
        if not busy:
            return None
        if time.monotonic() > end or any(_CACHE_THREAD not in name for name in busy):
            return f"threads: {', '.join(busy)}"
        time.sleep(0.01)


def _threads() -> list[tuple[str, str]]:
    """Return name and state of this process's threads other than the main one."""
    found = []
    main = Path("/proc/self").resolve().name
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(") ")
            if folder.name != main:
                found.append((name.partition(" (")[2], rest[0]))
    return found


def end_display() -> None:
    """Close the display of MuJoCo's EGL backend, which ends Mesa's threads; no context is open."""
    egl: Any = sys.modules.get("mujoco.egl")  # not loaded: where libEGL is missing
    if egl is not None and egl.EGL_DISPLAY is not None:
        egl.EGL.eglTerminate(egl.EGL_DISPLAY)
        egl.EGL_DISPLAY = None
