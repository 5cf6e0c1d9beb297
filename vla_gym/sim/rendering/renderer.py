"""Offscreen rendering of both cameras, upright, into the caller's array."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from vla_gym.errors import ConfigError, RenderError
from vla_gym.sim.model_io import load_shared
from vla_gym.sim.rendering.mujoco_painter import MujocoPainter
from vla_gym.sim.rendering.painter import gl_renderer, make_painter

if TYPE_CHECKING:
    from vla_gym.suites.protocol import CompiledTask, Simulation

PROFILES = ("libero", "fast", "coarse")
CAMERAS = ("agentview", "robot0_eye_in_hand")

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

    It keeps nothing of a simulation: several may share it. The OpenGL context is made at the first
    render, because it must not exist before a fork (but see ``fork_safety``) and belongs to the
    thread that renders. Use one renderer a thread. ``MUJOCO_EGL_DEVICE_ID`` in the environment
    picks the device (0, 1, ...) for all renderers of a process; MuJoCo reads it at the first.
    """

    def __init__(
        self, task_model: CompiledTask, height: int, width: int, *, profile: str = "libero"
    ) -> None:
        """Prepare a renderer; nothing is allocated on the device yet.

        Args:
            task_model: Any task of the scene.
            height: Image height in pixels.
            width: Image width in pixels.
            profile: ``"libero"`` renders what robosuite renders, pixel for pixel; ``"fast"``
                leaves out anti-aliasing, reflections and shadows; ``"coarse"`` too, and draws
                large meshes, in software, with fewer triangles, whose vertices move by millimetres.

        Raises:
            ConfigError: Bad size or unknown profile.
        """
        if profile not in PROFILES:
            raise ConfigError(f"profile must be one of {PROFILES}, got {profile!r:.80}.")
        if not (1 <= height <= 4096 and 1 <= width <= 4096):
            raise ConfigError(f"Image sizes must be within 1..4096, got {height} x {width}.")
        self.height, self.width, self.profile = height, width, profile
        self._scene_key = task_model.scene_key
        self._shared = load_shared(task_model)
        self._gl: Any = None
        self._painter: MujocoPainter | None = None
        self._buffer = np.empty((height, width, 3), np.uint8)
        self._cameras: dict[str, mujoco.MjvCamera] = {}

    def render(
        self,
        sim: Simulation,
        out: np.ndarray | Sequence[np.ndarray],
        cameras: Sequence[str] = CAMERAS,
    ) -> None:
        """Render what the simulation observes now, see ``Simulation.prepare_render``.

        Args:
            sim: A simulation of this scene.
            out: uint8 (len(cameras), height, width, 3), or a (height, width, 3) array for each
                camera; written in place, first row on top.
            cameras: Camera names of the model.

        Raises:
            RenderError: No usable OpenGL context.
            ConfigError: ``out`` or a camera does not fit.
        """
        images = self._images(out, len(cameras))
        with self._drawing(sim, cameras) as (painter, data, views):
            for image, view in zip(images, views, strict=True):
                painter.draw(data, view, self._buffer)
                # OpenGL's first row is the bottom one.
                np.copyto(image, self._buffer[::-1])

    @contextlib.contextmanager
    def _drawing(
        self, sim: Simulation, cameras: Sequence[str]
    ) -> Iterator[tuple[Any, Any, list[mujoco.MjvCamera]]]:
        """Give a painter, the state to draw and the cameras, while the model is locked."""
        if sim.task_model.scene_key != self._scene_key:
            raise ConfigError(
                f"This renderer is for scene {self._scene_key!r}, the simulation plays "
                f"{sim.task_model.scene_key!r}."
            )
        views = [self._camera(name) for name in cameras]
        painter = self._activate()
        with self._shared.lock:
            yield painter, sim.prepare_render(), views

    def _images(self, out: np.ndarray | Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        """Return the array of each camera.

        Raises:
            ConfigError: A wrong number, shape or dtype, or an array that cannot be written to.
        """
        expected = (self.height, self.width, 3)
        images = list(out)
        found = [
            f"{'' if image.flags.writeable else 'read-only '}{image.dtype} {image.shape}"
            if isinstance(image, np.ndarray)
            else type(image).__name__
            for image in images
        ]
        if found != [f"uint8 {expected}"] * count:
            raise ConfigError(
                f"out must be {count} images, uint8 {expected}, got {len(images)}: "
                f"{', '.join(found) or 'none'}."
            )
        return images

    def renderer_info(self) -> str:
        """Return the name of OpenGL's renderer, see ``painter.gl_renderer``.

        Raises:
            RenderError: No usable OpenGL context.
        """
        self._activate()
        return gl_renderer()

    def close(self) -> None:
        """Free the OpenGL context; the renderer makes a new one when it is used again."""
        if self._painter is not None:
            self._gl.make_current()
            self._painter.free()
            self._painter = None
        if self._gl is not None:
            self._gl.free()
            self._gl = None

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

    def _activate(self) -> MujocoPainter:
        """Make the context current, and make it at first."""
        if self._painter is None:
            return self._make_painter()
        try:
            self._gl.make_current()
        except Exception as error:
            raise RenderError(
                f"The OpenGL context cannot be used here ({error}): it belongs to the thread that "
                "rendered first. Use one SceneRenderer a thread."
            ) from error
        return self._painter

    def _make_painter(self) -> MujocoPainter:
        self._gl = _new_gl_context(self.width, self.height)
        # Handlers run last in, first out: after the context exists, so that ours runs first.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        _open.add(self)
        try:
            with self._shared.lock:
                self._painter = self._new_painter()
        except Exception as error:
            self.close()
            gl_error = importlib.import_module("OpenGL.error").Error
            if not isinstance(error, mujoco.FatalError | gl_error | OSError | ImportError):
                raise
            raise RenderError(f"MuJoCo could not use OpenGL ({error}). {_EGL_HELP}") from error
        return self._painter

    def _new_painter(self) -> MujocoPainter:
        fast, coarse = self.profile != "libero", self.profile == "coarse"
        return make_painter(self._shared, self.width, self.height, fast=fast, coarse=coarse)

    def __del__(self) -> None:
        """Free the context; at interpreter exit its libraries may be gone already."""
        with contextlib.suppress(Exception):
            self.close()


@contextlib.contextmanager
def mesa_setting(name: str, value: str) -> Iterator[None]:
    """Set an environment variable that Mesa reads when a process opens its first display.

    A value that is set already is kept.
    """
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def without_mesa_threads() -> contextlib.AbstractContextManager[None]:
    """Let Mesa's software renderer, if it starts meanwhile, draw without threads of its own.

    With threads it damages the heap once in a million images or so: the drawing thread sees without
    a lock that an image is done and frees its fence, whose mutex the other thread is still about to
    unlock (``lp_fence_signalled`` in src/gallium/drivers/llvmpipe/lp_fence.c, and
    ``lp_setup_get_empty_scene``; seen with Mesa 22.3.6).
    """
    return mesa_setting("LP_NUM_THREADS", "0")


def _load_triton() -> None:
    """Load triton, which comes with torch for CUDA, before Mesa: each brings an LLVM.

    Where triton's is loaded second, as when a VLA follows the first image, the process ends with a
    segmentation fault (seen with triton of torch 2.13 and Mesa 22.3.6).
    """
    with contextlib.suppress(Exception):  # a broken one is not this function's matter
        importlib.import_module("triton")


def _new_gl_context(width: int, height: int) -> Any:
    """Return a headless OpenGL context of MuJoCo's EGL backend, made current.

    Raises:
        RenderError: libEGL is missing, or no device offers OpenGL.
    """
    _load_triton()
    try:
        # The loader's own message is clearer than what PyOpenGL makes of a missing library.
        ctypes.CDLL("libEGL.so.1")
        egl = importlib.import_module("mujoco.egl")
    except Exception as error:
        raise RenderError(f"EGL is not available ({error}). {_EGL_HELP}") from error
    # With the class attribute, a context whose constructor failed can be collected in silence.
    context_class = type("HeadlessContext", (egl.GLContext,), {"_context": None})
    try:
        with without_mesa_threads():
            context = context_class(width, height)
            context.make_current()
            return context
    except Exception as error:
        raise RenderError(f"No EGL device can render ({error}). {_EGL_HELP}") from error
