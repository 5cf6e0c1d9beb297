"""Whether a process whose images are drawn in software may be forked, OpenGL contexts and all.

A context of Mesa's software renderer is memory and code of one process, which a fork copies like
anything else. Not so threads, and memory that parent and child would both write to.

The thread that saves compiled shaders to disk is one of them, though it sleeps: a fork inherits the
condition variable it sleeps on, and the second or third shader that the fork compiles waits in
``pthread_cond_signal`` for ever for a sleeper that is not there (glibc 2.36, Mesa 22.3.6). So a
process that will be forked draws :func:`without_shader_cache`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from vla_gym.sim.rendering.renderer import mesa_setting


def without_shader_cache() -> contextlib.AbstractContextManager[None]:
    """Let Mesa, if it starts meanwhile, keep no cache of compiled shaders, nor a thread for it.

    About a second of processor time, once, for what the cache would have held.
    """
    return mesa_setting("MESA_SHADER_CACHE_DISABLE", "true")


def obstacle() -> str | None:
    """Say what forbids a fork of this process with its OpenGL contexts; None: nothing does."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in maps.splitlines():
        if "rw-s" in line.split()[1]:
            return f"shared memory: {line.split()[-1]}"
    threads = []
    for folder in Path("/proc/self/task").iterdir():
        if folder.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                threads.append((folder / "comm").read_text(errors="replace").strip())
    return f"threads: {', '.join(threads)}" if threads else None


def end_display() -> None:
    """Close the display of MuJoCo's EGL backend, which ends Mesa's threads; no context is open."""
    egl: Any = sys.modules.get("mujoco.egl")  # not loaded: where libEGL is missing
    if egl is not None and egl.EGL_DISPLAY is not None:
        egl.EGL.eglTerminate(egl.EGL_DISPLAY)
        egl.EGL_DISPLAY = None
