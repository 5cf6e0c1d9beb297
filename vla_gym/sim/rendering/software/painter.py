"""Draws with the compiled code of this folder what MuJoCo's renderer would draw."""

from __future__ import annotations

import ctypes
import importlib
import logging

import mujoco
import numpy as np

from vla_gym.sim.compiled import announce
from vla_gym.sim.model_io import SharedModel
from vla_gym.sim.rendering.mujoco_painter import MAX_GEOMS, MujocoPainter
from vla_gym.sim.rendering.software.draw_scene import draw_scene
from vla_gym.sim.rendering.software.gl_calls import load_table
from vla_gym.sim.rendering.software.mesh_chunks import MeshChunks, mesh_chunks
from vla_gym.sim.rendering.software.scene_memory import (
    COLUMNS,
    KNOWN_TYPES,
    geom_memory,
    light_rows,
)
from vla_gym.sim.rendering.software.structs import Resources, Scene, make_buffers

logger = logging.getLogger(__name__)

_SKY_SHARE = np.float32(0.70)  # radius of the skybox, of the far distance (mjr_render)
_MAX_SAMPLES = 4  # that the culling code tests
_SKYBOX_KIND = int(mujoco.mjtTexture.mjTEXTURE_SKYBOX)


def can_draw(model: mujoco.MjModel, fast: bool) -> bool:
    """Tell whether a model has only what :class:`SoftwarePainter` knows, whatever its state."""
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


def preload(shared: SharedModel, *, coarse: bool = False) -> None:
    """Cut a model's meshes and load compiled code, both without OpenGL.

    For a process that forks others: they share what :class:`SoftwarePainter` needs.
    """
    announce(draw_scene, "the drawing code")
    table, none = np.zeros(1, np.int64), np.zeros(0, np.int32)
    numbers = np.zeros((0, COLUMNS), np.int32)
    scene = Scene(
        numbers=numbers,
        values=numbers.view(np.float32),
        head=np.zeros(3, np.float32),
        lights=np.zeros((0, 7), np.float32),
        chunks=mesh_chunks(shared, coarse=coarse)[1:],
        resources=Resources(
            table.ctypes.data, 0, 0, none, none, none, np.zeros(0, np.float32), none, -1
        ),
        buffers=make_buffers(1, 1),
    )
    axes = (np.zeros(3), np.zeros(3), np.zeros(3))
    samples = np.zeros((_MAX_SAMPLES, 2), np.float32)
    draw_scene(scene, axes, (1.0, 1.0, 1.0, 1.0), (1, 1), True, samples)


class SoftwarePainter(MujocoPainter):
    """Draws only what can be seen, see ``draw_scene`` and ``culling``.

    Attributes:
        usable: Whether MuJoCo's scene has the layout that the drawing code expects; if not, the
            painter must not draw.
    """

    # Meshes, which are drawn from a buffer of their own.
    _unseen = {"mesh_facenum": 0, "mesh_graphadr": -1}

    def __init__(
        self, shared: SharedModel, width: int, height: int, *, fast: bool, coarse: bool = False
    ) -> None:
        """Upload the model; the caller holds its lock, an OpenGL context is current."""
        super().__init__(shared, width, height, fast=fast)
        memory = geom_memory(self._scene)
        self.usable = memory is not None and self._context.offSamples <= _MAX_SAMPLES
        if memory is None or not self.usable:
            logger.warning("Rendering will be slow: unknown layout of mjvGeom or many samples.")
            return
        self._numbers, self._values = memory, memory.view(np.float32)
        chunks = mesh_chunks(shared, coarse=coarse)
        self._chunks = chunks[1:]
        self._size, self._reflections = (width, height), not fast
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 0  # drawn by draw_scene
        self._table = load_table()
        self._resources = _resources(self._context, self._table)
        self._samples = _sample_positions(self._context)
        self._buffers = make_buffers(MAX_GEOMS, self._most_triangles())
        self._axes = (np.zeros(3), np.zeros(3), np.zeros(3))
        self._fill_buffer(chunks)
        announce(draw_scene, "the drawing code")

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
        """See :meth:`MujocoPainter.draw`."""
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
            Scene(
                numbers=self._numbers[:count],
                values=self._values[:count],
                head=self._axes[0].astype(np.float32),
                lights=light_rows(scene),
                chunks=self._chunks,
                resources=self._resources,
                buffers=self._buffers,
            ),
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
        )
        mujoco.mjr_readPixels(pixels, None, self._rect, self._context)

    def free(self) -> None:
        """See :meth:`MujocoPainter.free`."""
        if self.usable:
            gl = importlib.import_module("OpenGL.GL")
            gl.glDeleteBuffers(1, [self._buffer])
        super().free()


def _resources(context: mujoco.MjrContext, table: np.ndarray) -> Resources:
    uniform = np.asarray(context.mat_texuniform, np.int32)
    roles = np.asarray(context.mat_texid, np.int32).reshape(len(uniform), -1)
    kinds = np.asarray(context.textureType, np.int32)[: context.ntexture]
    names = np.asarray(context.texture, np.int32)[: context.ntexture]
    sky = np.flatnonzero(kinds == _SKYBOX_KIND)
    return Resources(
        table=table.ctypes.data,
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
