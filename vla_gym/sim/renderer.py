"""Offscreen rendering of both cameras, upright, into the caller's array."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from vla_gym.errors import ConfigError, RenderError
from vla_gym.sim.model_io import load_shared

if TYPE_CHECKING:
    from vla_gym.sim.libero_sim import LiberoSim
    from vla_gym.task_model import TaskModel

PROFILES = ("libero", "fast")
CAMERAS = ("agentview", "robot0_eye_in_hand")

# As upstream's render context: no collision geoms, at most this many geoms in the scene.
_MAX_GEOMS = 1000
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
_GL_RENDERER = 0x1F01
_EGL_HELP = (
    "MuJoCo renders through EGL. On Debian or Ubuntu: apt-get install -y libegl1 libgl1-mesa-dri"
)

# Renderers that hold an OpenGL context. They are closed at interpreter exit, before MuJoCo's own
# exit handler takes the display away from under them.
_open: weakref.WeakSet[SceneRenderer] = weakref.WeakSet()


def _close_all() -> None:
    for renderer in list(_open):
        with contextlib.suppress(Exception):
            renderer.close()


class SceneRenderer:
    """Renders simulations of one scene.

    The OpenGL context is made at the first render, because it must not exist before a fork and
    belongs to the thread that renders. Use one renderer a thread.
    """

    def __init__(
        self, task_model: TaskModel, height: int, width: int, *, profile: str = "libero"
    ) -> None:
        """Prepare a renderer; nothing is allocated on the device yet.

        Args:
            task_model: Any task of the scene.
            height: Image height in pixels.
            width: Image width in pixels.
            profile: ``"libero"`` renders what robosuite renders, pixel for pixel; ``"fast"``
                leaves out anti-aliasing, reflections and shadows.

        Raises:
            ConfigError: Bad size or unknown profile.
        """
        if profile not in PROFILES:
            raise ConfigError(f"profile must be 'libero' or 'fast', got {profile!r}.")
        if not (1 <= height <= 4096 and 1 <= width <= 4096):
            raise ConfigError(f"Image sizes must be within 1..4096, got {height} x {width}.")
        self.height, self.width, self.profile = height, width, profile
        self._scene_key = task_model.scene_key
        self._shared = load_shared(task_model)
        self._gl: Any = None
        self._context: mujoco.MjrContext | None = None
        self._scene: mujoco.MjvScene | None = None
        self._option = mujoco.MjvOption()
        self._option.geomgroup[_COLLISION_GROUP] = 0
        self._option.geomgroup[_VISUAL_GROUP] = 1
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._buffer = np.empty((height, width, 3), np.uint8)
        self._cameras: dict[str, mujoco.MjvCamera] = {}

    def render(self, sim: LiberoSim, out: np.ndarray, cameras: Sequence[str] = CAMERAS) -> None:
        """Render the simulation's present state.

        Args:
            sim: A simulation of this scene.
            out: uint8 (len(cameras), height, width, 3), written in place, first row on top.
            cameras: Camera names of the model.

        Raises:
            RenderError: No usable OpenGL context.
            ConfigError: ``out`` or a camera does not fit.
        """
        expected = (len(cameras), self.height, self.width, 3)
        if out.shape != expected or out.dtype != np.uint8:
            raise ConfigError(f"out must be uint8 {expected}, got {out.dtype} {out.shape}.")
        if sim.task_model.scene_key != self._scene_key:
            raise ConfigError(
                f"This renderer is for scene {self._scene_key!r}, the simulation plays "
                f"{sim.task_model.scene_key!r}."
            )
        views = [self._camera(name) for name in cameras]
        self._activate()
        with self._shared.lock:
            sim.prepare_render()
            for index, view in enumerate(views):
                self._draw(sim.data, view, out[index])

    def renderer_info(self) -> str:
        """Return the OpenGL renderer's name, e.g. ``"llvmpipe (LLVM 15.0.7, 256 bits)"``.

        Raises:
            RenderError: No usable OpenGL context.
        """
        self._activate()
        get_string = importlib.import_module("OpenGL.GL").glGetString
        value = get_string(_GL_RENDERER)
        return value.decode() if value else "unknown"

    def close(self) -> None:
        """Free the OpenGL context; the renderer makes a new one when it is used again."""
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._context = None
        if self._gl is not None:
            self._gl.free()
            self._gl = None
        self._scene = None

    def _camera(self, name: str) -> mujoco.MjvCamera:
        if name not in self._cameras:
            model = self._shared.model
            index = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name)
            if index < 0:
                known = [model.camera(i).name for i in range(model.ncam)]
                raise ConfigError(f"Unknown camera {name!r}: expected one of {known}.")
            camera = mujoco.MjvCamera()
            camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            camera.fixedcamid = index
            self._cameras[name] = camera
        return self._cameras[name]

    def _draw(self, data: mujoco.MjData, camera: mujoco.MjvCamera, out: np.ndarray) -> None:
        mujoco.mjv_updateScene(
            self._shared.model,
            data,
            self._option,
            None,
            camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        mujoco.mjr_render(self._rect, self._scene, self._context)
        mujoco.mjr_readPixels(self._buffer, None, self._rect, self._context)
        # OpenGL's first row is the bottom one.
        np.copyto(out, self._buffer[::-1])

    def _activate(self) -> None:
        """Make the context current, and make it at first."""
        if self._context is None:
            self._make_context()
            return
        try:
            self._gl.make_current()
        except Exception as error:
            raise RenderError(
                f"The OpenGL context cannot be used here ({error}): it belongs to the thread that "
                "rendered first. Use one SceneRenderer a thread."
            ) from error

    def _make_context(self) -> None:
        self._gl = _new_gl_context(self.width, self.height)
        # Handlers run last in, first out: after the context exists, so that ours runs first.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        _open.add(self)
        model = self._shared.model
        with self._shared.lock:
            # The context takes its buffer size and samples from the model, which others share.
            quality, size = model.vis.quality, model.vis.global_
            saved = (quality.offsamples, quality.shadowsize, size.offwidth, size.offheight)
            size.offwidth, size.offheight = self.width, self.height
            if self.profile == "fast":
                quality.offsamples = quality.shadowsize = 0
            try:
                self._gl.make_current()
                self._scene = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
                self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
            except Exception as error:
                self.close()
                message = f"MuJoCo could not use OpenGL ({error}). {_EGL_HELP}"
                raise RenderError(message) from error
            finally:
                quality.offsamples, quality.shadowsize, size.offwidth, size.offheight = saved
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        if self.profile == "fast":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0

    def __del__(self) -> None:
        """Free the context; at interpreter exit its libraries may be gone already."""
        with contextlib.suppress(Exception):
            self.close()


def _new_gl_context(width: int, height: int) -> Any:
    """Return a headless OpenGL context of MuJoCo's EGL backend.

    Raises:
        RenderError: libEGL is missing, or no device offers OpenGL.
    """
    try:
        # The loader's own message is clearer than what PyOpenGL makes of a missing library.
        ctypes.CDLL("libEGL.so.1")
        egl = importlib.import_module("mujoco.egl")
    except Exception as error:
        raise RenderError(f"EGL is not available ({error}). {_EGL_HELP}") from error
    # With the class attribute, a context whose constructor failed can be collected in silence.
    context_class = type("HeadlessContext", (egl.GLContext,), {"_context": None})
    try:
        return context_class(width, height)
    except Exception as error:
        raise RenderError(f"No EGL device can render ({error}). {_EGL_HELP}") from error
