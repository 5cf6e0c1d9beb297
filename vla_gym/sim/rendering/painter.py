"""The door to rendering: which painter draws a model here."""

from __future__ import annotations

import glob
import importlib
import os

from vla_gym.sim.model_io import SharedModel
from vla_gym.sim.rendering.mujoco_painter import MujocoPainter

_SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")
_GPUS = ("/dev/dri/renderD*", "/dev/nvidia[0-9]*", "/dev/dxg")  # Linux, NVIDIA's, WSL


def make_painter(
    shared: SharedModel, width: int, height: int, *, fast: bool, coarse: bool = False
) -> MujocoPainter:
    """Return the quickest painter of a model, in the current OpenGL context.

    Args:
        shared: The model; the caller holds its lock.
        width: Image width in pixels.
        height: Image height in pixels.
        fast: Without anti-aliasing, reflections and shadows.
        coarse: Where it is drawn in software: with fewer triangles.

    Raises:
        RenderError: If the OpenGL library lacks a function.
        Exception: What MuJoCo raises when it cannot use OpenGL.
    """
    if any(word in gl_renderer().lower() for word in _SOFTWARE_RENDERERS):
        from vla_gym.sim.rendering import software  # a GPU never enters it

        if software.can_draw(shared.model, fast):
            painter = software.SoftwarePainter(shared, width, height, fast=fast, coarse=coarse)
            if painter.usable:
                return painter
            painter.free()
    return MujocoPainter(shared, width, height, fast=fast)


def gl_renderer() -> str:
    """Return who draws in the current OpenGL context, e.g. "llvmpipe (LLVM 15.0.7, 256 bits)"."""
    gl = importlib.import_module("OpenGL.GL")
    return (gl.glGetString(gl.GL_RENDERER) or b"unknown").decode()


def surely_in_software() -> bool:
    """Tell, without OpenGL, whether images here are drawn by a software renderer: there is no GPU.

    False is no answer: OpenGL may fail to use a GPU that is there.
    """
    return os.environ.get("LIBGL_ALWAYS_SOFTWARE", "").lower() in ("1", "true") or not has_gpu()


def has_gpu() -> bool:
    """Tell whether the system offers a GPU, whatever is used."""
    return any(glob.glob(pattern) for pattern in _GPUS)


def preload(shared: SharedModel, *, coarse: bool = False) -> None:
    """Load without OpenGL what drawing in software needs, for processes that are forked from here.

    Does nothing where a GPU may draw.
    """
    if surely_in_software():
        from vla_gym.sim.rendering import software

        software.preload(shared, coarse=coarse)
