"""What the doctor tries out in a process of its own: ``python probes.py PROBE [PACK]``.

Prints one JSON object. Imports nothing but the standard library at the top, and runs by its path,
so that it has an answer where nothing else works.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_EXTENSIONS, _VENDOR = 0x3055, 0x3053
_CUDA_DEVICE, _DRM_FILE = 0x323A, 0x3233
_PLATFORM_DEVICE = 0x313F
_MAX_DEVICES = 64
#: What a vision-language model of transformers needs; a broken torchvision shows only here.
_CLASSES = ("PreTrainedModel", "AutoModel", "AutoProcessor")
SPEED_SECONDS = 5.0
IMAGE_SIZE = 128
#: "Pick up the black bowl on the ramekin": the task that newer MuJoCo versions spoil.
SETTLE_TASK = ("spatial", 5)
SETTLE_JOINT, SETTLE_BODY = "akita_black_bowl_1_joint0", "akita_black_bowl_1_main"


def gl() -> dict[str, Any]:
    """Return what EGL offers: ``library``, ``devices``, ``renderer``; null where there is none."""
    answer: dict[str, Any] = {"library": True, "devices": [], "renderer": None, "error": ""}
    try:
        answer["devices"] = egl_devices()
    except OSError as error:
        return {**answer, "library": False, "error": str(error)}
    try:
        answer["renderer"] = gl_renderer()
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def egl_devices() -> list[dict[str, Any]]:
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


def gl_renderer() -> str:
    """Return the GL_RENDERER and GL_VERSION strings of the context that MuJoCo would use."""
    import mujoco.egl

    context = mujoco.egl.GLContext(16, 16)
    context.make_current()
    from OpenGL import GL

    text = f"{GL.glGetString(GL.GL_RENDERER).decode()} | {GL.glGetString(GL.GL_VERSION).decode()}"
    context.free()
    return text


def imports() -> dict[str, Any]:
    """Import torch, torchvision and transformers; say how that went and which CUDA devices are."""
    answer: dict[str, Any] = {"torch": attempt("torch"), "cuda": []}
    answer["torchvision"] = attempt("torchvision")
    answer["transformers"] = attempt("transformers", _CLASSES)
    if answer["torch"]["version"]:
        import torch

        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            answer["cuda"] = [torch.cuda.get_device_name(i) for i in range(count)]
    return answer


def attempt(name: str, classes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Import a module and some of its names; return version and error, null where there is none."""
    try:
        module = importlib.import_module(name)
        for member in classes:
            getattr(module, member)
    except ModuleNotFoundError as error:
        missing = error.name == name
        return {"version": None, "error": None if missing else f"ModuleNotFoundError: {error}"}
    except Exception as error:  # a broken library may raise anything
        line = str(error).strip().splitlines()
        return {
            "version": None,
            "error": f"{type(error).__name__}: {line[0] if line else ''}"[:300],
        }
    return {"version": getattr(module, "__version__", "unknown"), "error": None}


def settle(pack: str) -> dict[str, Any]:
    """Return how far, in cm, the bowl slides sideways while an official state settles."""
    import mujoco
    import numpy as np

    from vla_gym.sim import LiberoSim
    from vla_gym.suites import get_task
    from vla_gym.suites.libero import load_task_model

    model = load_task_model(get_task(*SETTLE_TASK), pack)
    sim = LiberoSim(model)
    layout = model.official_layout(0)
    scene = mujoco.MjModel.from_binary_path(str(model.mjb_path))
    start = layout.qpos[scene.joint(SETTLE_JOINT).qposadr[0] :][:2]
    sim.reset(layout)
    slid = np.linalg.norm(sim.body_pos(SETTLE_BODY)[:2] - start)
    return {"pack": model.assets.name, "cm": 100 * float(slid), "mujoco": mujoco.__version__}


def speed(pack: str) -> dict[str, Any]:
    """Return control steps a second of one environment, with two images each and without."""
    import gymnasium as gym
    import numpy as np

    import vla_gym  # noqa: F401

    rates = {}
    for name, cameras in (("images", ("agentview", "wrist")), ("states", ())):
        env = gym.make(
            "Libero-goal-v0",
            task_ids=8,
            assets=pack,
            cameras=cameras,
            image_size=IMAGE_SIZE,
            max_control_steps=10**6,  # never over while the clock runs
        )
        env.reset(seed=0)
        action = np.zeros(7, dtype=np.float32)
        env.step(action)
        rates[name] = _rate(lambda env=env, action=action: env.step(action), SPEED_SECONDS / 2)  # type: ignore[misc]
        env.close()
    return {"pack": pack, **rates, "cores": len(os.sched_getaffinity(0))}


def _rate(step: Callable[[], Any], seconds: float) -> float:
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        step()
        count += 1
    return count / passed


def main() -> None:
    """Run the probe that the arguments name."""
    probes: dict[str, Callable[..., dict[str, Any]]] = {
        "gl": gl,
        "imports": imports,
        "settle": settle,
        "speed": speed,
    }
    try:
        answer = probes[sys.argv[1]](*sys.argv[2:])
    except Exception as error:
        # A broken library may raise anything; one of this package's errors says it in one line.
        line = (str(error).strip().splitlines() or [""])[0][:300]
        is_ours = type(error).__module__ == "vla_gym.errors"
        answer = {"error": line if is_ours else f"{type(error).__name__}: {line}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what counts is out; graphics drivers are known to crash while unloaded


if __name__ == "__main__":
    main()
