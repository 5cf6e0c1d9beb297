"""Two ways to draw a scene with the same result: MuJoCo's, and one that leaves out the invisible.

On a GPU MuJoCo's own ``mjr_render`` is fast, and :class:`PlainPainter` uses it. On a software
renderer the corners and pixels of some 200,000 triangles an image are what rendering costs, and
:class:`LeanPainter` draws the few thousand that can be seen; it also spares OpenGL's copy of the
meshes, 300 MB with LIBERO's. What the lean painter does not know it leaves to the plain one.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Protocol

import mujoco
import numpy as np

from vla_gym.sim.compiled import announce
from vla_gym.sim.draw_geoms import Resources
from vla_gym.sim.draw_passes import make_desk
from vla_gym.sim.draw_scene import draw_scene
from vla_gym.sim.gl_calls import load_table
from vla_gym.sim.mesh_chunks import MeshChunks, mesh_chunks
from vla_gym.sim.model_io import SharedModel
from vla_gym.sim.scene_memory import COLUMNS, KNOWN_TYPES, geom_memory, light_rows

logger = logging.getLogger(__name__)

# As upstream's render context: no collision geoms, at most this many geoms in the scene.
MAX_GEOMS = 1000
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
_SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")
_GPUS = ("/dev/dri/renderD*", "/dev/nvidia[0-9]*", "/dev/dxg")  # Linux, NVIDIA's, WSL
_SKY_SHARE = np.float32(0.70)  # radius of the skybox, of the far distance (mjr_render)
_MAX_SAMPLES = 4  # that the culling code tests
_ALL_CATEGORIES = mujoco.mjtCatBit.mjCAT_ALL
_SKYBOX_KIND = int(mujoco.mjtTexture.mjTEXTURE_SKYBOX)


class Painter(Protocol):
    """Draws the simulation's state as a camera sees it; its OpenGL context is current."""

    def draw(self, data: mujoco.MjData, camera: mujoco.MjvCamera, pixels: np.ndarray) -> None:
        """Fill ``pixels``, uint8 (height, width, 3), first row at the bottom."""

    def free(self) -> None:
        """Free what the painter holds in the OpenGL context."""


def make_painter(shared: SharedModel, width: int, height: int, *, fast: bool) -> Painter:
    """Return the quickest painter that draws a model exactly, in the current OpenGL context.

    Args:
        shared: The model; the caller holds its lock.
        width: Image width in pixels.
        height: Image height in pixels.
        fast: Without anti-aliasing, reflections and shadows.

    Raises:
        RenderError: If the OpenGL library lacks a function.
        Exception: What MuJoCo raises when it cannot use OpenGL.
    """
    gl = importlib.import_module("OpenGL.GL")
    name = (gl.glGetString(gl.GL_RENDERER) or b"").decode().lower()
    if any(word in name for word in _SOFTWARE_RENDERERS) and _is_simple(shared.model, fast):
        painter = LeanPainter(shared, width, height, fast=fast)
        if painter.usable:
            return painter
        painter.free()
    return PlainPainter(shared, width, height, fast=fast)


def surely_in_software() -> bool:
    """Tell, without OpenGL, whether images here are drawn by a software renderer: there is no GPU.

    False is no answer: OpenGL may fail to use a GPU that is there.
    """
    if os.environ.get("LIBGL_ALWAYS_SOFTWARE", "").lower() in ("1", "true"):
        return True
    return not any(glob.glob(pattern) for pattern in _GPUS)


def preload(shared: SharedModel) -> None:
    """Cut a model's meshes and load compiled code, both without OpenGL.

    For a process that forks others: they share what :class:`LeanPainter` needs.
    """
    announce(draw_scene, "the drawing code")
    chunks = mesh_chunks(shared)
    table, none = np.zeros(1, np.int64), np.zeros(0, np.int32)
    held = Resources(table.ctypes.data, 0, 0, none, none, none, np.zeros(0, np.float32), none, -1)
    numbers = np.zeros((0, COLUMNS), np.int32)
    axes = (np.zeros(3), np.zeros(3), np.zeros(3))
    samples, lights = np.zeros((_MAX_SAMPLES, 2), np.float32), np.zeros((0, 7), np.float32)
    optics, desk = (1.0, 1.0, 1.0, 1.0), make_desk(1, 1)
    draw_scene(
        numbers,
        numbers.view(np.float32),
        lights,
        axes,
        optics,
        (1, 1),
        True,
        samples,
        chunks[1:],
        held,
        desk,
    )


class PlainPainter:
    """Draws with MuJoCo's ``mjr_render``."""

    def __init__(self, shared: SharedModel, width: int, height: int, *, fast: bool) -> None:
        """Upload the model; the caller holds its lock, an OpenGL context is current."""
        self._model = shared.model
        self._option = mujoco.MjvOption()
        self._option.geomgroup[_COLLISION_GROUP] = 0
        self._option.geomgroup[_VISUAL_GROUP] = 1
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._scene = mujoco.MjvScene(self._model, maxgeom=MAX_GEOMS)
        with self._set_up(width, height, fast):
            self._context = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        if fast:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0

    @contextlib.contextmanager
    def _set_up(self, width: int, height: int, fast: bool) -> Iterator[None]:
        """Write buffer sizes and samples into the model, which others share, for a while."""
        quality, size = self._model.vis.quality, self._model.vis.global_
        saved = (quality.offsamples, quality.shadowsize, size.offwidth, size.offheight)
        size.offwidth, size.offheight = width, height
        if fast:
            quality.offsamples = quality.shadowsize = 0
        try:
            yield
        finally:
            quality.offsamples, quality.shadowsize, size.offwidth, size.offheight = saved

    def _update(self, data: mujoco.MjData, camera: mujoco.MjvCamera) -> None:
        # Once a camera: lights follow it.
        mujoco.mjv_updateScene(
            self._model, data, self._option, None, camera, _ALL_CATEGORIES, self._scene
        )

    def draw(self, data: mujoco.MjData, camera: mujoco.MjvCamera, pixels: np.ndarray) -> None:
        """See :meth:`Painter.draw`."""
        self._update(data, camera)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, self._rect, self._context)

    def free(self) -> None:
        """See :meth:`Painter.free`."""
        self._context.free()


class LeanPainter(PlainPainter):
    """Draws only what can be seen; see :mod:`vla_gym.sim.culling` and ``draw_scene``.

    Attributes:
        usable: Whether MuJoCo's scene has the layout that the drawing code expects; if not, the
            painter must not draw.
    """

    def __init__(self, shared: SharedModel, width: int, height: int, *, fast: bool) -> None:
        """Upload the model; the caller holds its lock, an OpenGL context is current."""
        super().__init__(shared, width, height, fast=fast)
        memory = geom_memory(self._scene)
        self.usable = memory is not None and self._context.offSamples <= _MAX_SAMPLES
        if memory is None or not self.usable:
            logger.warning("Rendering will be slow: unknown layout of mjvGeom or many samples.")
            return
        self._numbers, self._values = memory, memory.view(np.float32)
        chunks = mesh_chunks(shared)
        self._chunks = chunks[1:]
        self._size, self._reflections = (width, height), not fast
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 0  # drawn by draw_scene
        self._table = load_table()
        self._held = _resources(self._context, self._table)
        self._samples = _sample_positions(self._context)
        self._desk = make_desk(MAX_GEOMS, self._most_triangles())
        self._axes = (np.zeros(3), np.zeros(3), np.zeros(3))
        self._fill_buffer(chunks)
        announce(draw_scene, "the drawing code")

    @contextlib.contextmanager
    def _set_up(self, width: int, height: int, fast: bool) -> Iterator[None]:
        """As for the plain painter, and hide meshes and the unused shadow map from MuJoCo."""
        model = self._model
        saved = (model.mesh_facenum.copy(), model.mesh_graphadr.copy())
        with super()._set_up(width, height, fast):
            model.vis.quality.shadowsize = 0
            model.mesh_facenum[:], model.mesh_graphadr[:] = 0, -1
            try:
                yield
            finally:
                model.mesh_facenum[:], model.mesh_graphadr[:] = saved

    def _most_triangles(self) -> int:
        """Return how many triangles a scene has if every mesh geom of the model is shown."""
        model = self._model
        meshes = model.geom_dataid[np.asarray(model.geom_type) == mujoco.mjtGeom.mjGEOM_MESH]
        return int(model.mesh_facenum[meshes[meshes >= 0]].sum())

    def _fill_buffer(self, chunks: MeshChunks) -> None:
        gl = importlib.import_module("OpenGL.GL")
        self._buffer = gl.glGenBuffers(1)
        gl.glBindBuffer(gl.GL_ARRAY_BUFFER, self._buffer)
        vertices = chunks.vertices
        gl.glBufferData(gl.GL_ARRAY_BUFFER, vertices.nbytes, vertices, gl.GL_STATIC_DRAW)
        stride = vertices.strides[0]
        gl.glVertexPointer(3, gl.GL_FLOAT, stride, ctypes.c_void_p(0))
        gl.glNormalPointer(gl.GL_FLOAT, stride, ctypes.c_void_p(12))
        gl.glTexCoordPointer(2, gl.GL_FLOAT, stride, ctypes.c_void_p(24))
        gl.glBindBuffer(gl.GL_ARRAY_BUFFER, 0)
        gl.glEnableClientState(gl.GL_VERTEX_ARRAY)
        gl.glEnableClientState(gl.GL_NORMAL_ARRAY)

    def draw(self, data: mujoco.MjData, camera: mujoco.MjvCamera, pixels: np.ndarray) -> None:
        """See :meth:`Painter.draw`."""
        self._update(data, camera)
        scene = self._scene
        count = scene.ngeom
        # Clears the image and sets up camera and lights.
        scene.ngeom = 0
        mujoco.mjr_render(self._rect, scene, self._context)
        scene.ngeom = count
        mujoco.mjv_cameraInModel(*self._axes, scene)
        frustum, (width, height) = scene.camera[0], self._size
        tangent = float(frustum.frustum_top) / float(frustum.frustum_near)
        draw_scene(
            self._numbers[:count],
            self._values[:count],
            light_rows(scene),
            self._axes,
            (
                tangent * width / height,
                tangent,
                float(frustum.frustum_near),
                float(np.float32(frustum.frustum_far) * _SKY_SHARE),
            ),
            self._size,
            self._reflections,
            self._samples,
            self._chunks,
            self._held,
            self._desk,
        )
        mujoco.mjr_readPixels(pixels, None, self._rect, self._context)

    def free(self) -> None:
        """See :meth:`Painter.free`."""
        if self.usable:
            gl = importlib.import_module("OpenGL.GL")
            gl.glDeleteBuffers(1, [self._buffer])
        super().free()


def _is_simple(model: mujoco.MjModel, fast: bool) -> bool:
    """Tell whether a model has only what ``draw_scene`` knows, whatever its state."""
    plane = np.asarray(model.geom_type) == mujoco.mjtGeom.mjGEOM_PLANE
    sizes = np.asarray(model.geom_size)[plane][:, :2]
    kinds = {int(kind) for kind in (*model.geom_type, *model.site_type)}
    return bool(
        kinds <= set(KNOWN_TYPES)
        and (fast or not np.any(model.light_castshadow))
        and not np.any(sizes == 0)  # infinite planes
        and model.nskin == model.nflex == 0
        and (fast or model.vis.quality.offsamples <= _MAX_SAMPLES)
        and np.all(np.asarray(model.cam_orthographic) == 0)
        and hasattr(mujoco.MjvLight(), "type")
    )


def _resources(context: mujoco.MjrContext, table: np.ndarray) -> Resources:
    uniform = np.asarray(context.mat_texuniform, np.int32)
    roles = np.asarray(context.mat_texid, np.int32).reshape(len(uniform), -1)
    kinds = np.asarray(context.textureType, np.int32)[: context.ntexture]
    names = np.asarray(context.texture, np.int32)[: context.ntexture]
    sky = np.flatnonzero(kinds == _SKYBOX_KIND)
    return Resources(
        gl=table.ctypes.data,
        builtin_lists=int(context.baseBuiltin),
        plane_lists=int(context.basePlane),
        material_texture=roles[:, int(mujoco.mjtTextureRole.mjTEXROLE_RGB)].copy(),
        texture_names=names.copy(),
        texture_kinds=kinds.copy(),
        repeats=np.asarray(context.mat_texrepeat, np.float32).ravel().copy(),
        uniform=uniform.copy(),
        skybox=int(names[sky[0]]) if len(sky) else -1,
    )


def _sample_positions(context: mujoco.MjrContext) -> np.ndarray:
    """Return float32 (4, 2): where in a pixel the image is sampled; fewer points are repeated."""
    count = int(context.offSamples)
    if count == 0:
        return np.full((_MAX_SAMPLES, 2), 0.5, np.float32)
    gl = importlib.import_module("OpenGL.GL")
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
    positions = np.zeros((count, 2), np.float32)
    for number in range(count):
        gl.glGetMultisamplefv(gl.GL_SAMPLE_POSITION, number, positions[number])
    return np.resize(positions, (_MAX_SAMPLES, 2))
