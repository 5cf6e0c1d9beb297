"""A program: prints what EGL offers on this machine, as one JSON object.

Needs nothing but ctypes for the list of devices, so that it has an answer where MuJoCo has none.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

_EXTENSIONS, _VENDOR = 0x3055, 0x3053
_CUDA_DEVICE, _DRM_FILE = 0x323A, 0x3233
_PLATFORM_DEVICE = 0x313F
_MAX_DEVICES = 64


def devices() -> list[dict[str, Any]]:
    """Return EGL's devices in EGL's own order, which MUJOCO_EGL_DEVICE_ID counts.

    Raises:
        OSError: If libEGL is missing.
    """
    egl = ctypes.CDLL("libEGL.so.1")
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]

    def function(name: str, result: Any, *arguments: Any) -> Any:
        address = egl.eglGetProcAddress(name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    pointer, integer = ctypes.c_void_p, ctypes.c_int
    many = ctypes.POINTER(pointer)
    query = function("eglQueryDevicesEXT", integer, integer, many, ctypes.POINTER(integer))
    text = function("eglQueryDeviceStringEXT", ctypes.c_char_p, pointer, integer)
    attribute = function(
        "eglQueryDeviceAttribEXT", integer, pointer, integer, ctypes.POINTER(ctypes.c_ssize_t)
    )
    display = function("eglGetPlatformDisplayEXT", pointer, integer, pointer, pointer)
    if query is None or display is None:
        return []
    found, count = (pointer * _MAX_DEVICES)(), integer(0)
    if not query(_MAX_DEVICES, found, ctypes.byref(count)):
        return []
    egl.eglInitialize.argtypes = [pointer, pointer, pointer]
    egl.eglQueryString.argtypes = [pointer, integer]
    egl.eglQueryString.restype = ctypes.c_char_p
    egl.eglTerminate.argtypes = [pointer]
    rows = []
    for device in found[: count.value]:
        extensions = (text(device, _EXTENSIONS) or b"").decode() if text else ""
        row: dict[str, Any] = {"cuda": None, "file": None, "vendor": None}
        value = ctypes.c_ssize_t()
        if "EGL_NV_device_cuda" in extensions and attribute is not None:
            if attribute(device, _CUDA_DEVICE, ctypes.byref(value)):
                row["cuda"] = value.value
        if "EGL_EXT_device_drm" in extensions.split():
            row["file"] = (text(device, _DRM_FILE) or b"").decode() or None
        shown = display(_PLATFORM_DEVICE, device, None)
        row["works"] = bool(shown and egl.eglInitialize(shown, None, None))
        if row["works"]:
            row["vendor"] = (egl.eglQueryString(shown, _VENDOR) or b"").decode()
            egl.eglTerminate(shown)
        rows.append(row)
    return rows


def renderer() -> str:
    """Return the GL_RENDERER and GL_VERSION strings of the context that MuJoCo would use."""
    import mujoco.egl

    context = mujoco.egl.GLContext(16, 16)
    context.make_current()
    from OpenGL import GL

    text = f"{GL.glGetString(GL.GL_RENDERER).decode()} | {GL.glGetString(GL.GL_VERSION).decode()}"
    context.free()
    return text


def main() -> None:
    """Print the answer: ``library``, ``devices``, ``renderer``; null where there is none."""
    answer: dict[str, Any] = {"library": True, "devices": [], "renderer": None, "error": ""}
    try:
        answer["devices"] = devices()
    except OSError as error:
        answer |= {"library": False, "error": str(error)}
    if answer["library"]:
        try:
            answer["renderer"] = renderer()
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # drivers are known to crash while they are unloaded


if __name__ == "__main__":
    main()
