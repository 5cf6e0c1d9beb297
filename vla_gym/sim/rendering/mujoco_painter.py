"""Draws with MuJoCo's own renderer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

import mujoco
import numpy as np

from vla_gym.sim.model_io import SharedModel

# As upstream's render context: no collision geoms, at most this many geoms in the scene.
MAX_GEOMS = 1000
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
_ALL_CATEGORIES = mujoco.mjtCatBit.mjCAT_ALL


class MujocoPainter:
    """Draws the simulation's state with MuJoCo's ``mjr_render``; its OpenGL context is current."""

    # Arrays of the model that are filled with a number while MuJoCo uploads it.
    _unseen: ClassVar[Mapping[str, int]] = {}

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
        """Write what the upload is to see into the model, which others share, for a while."""
        quality, size = self._model.vis.quality, self._model.vis.global_
        saved = (quality.offsamples, quality.shadowsize, size.offwidth, size.offheight)
        arrays = {name: getattr(self._model, name) for name in self._unseen}
        kept = {name: array.copy() for name, array in arrays.items()}
        size.offwidth, size.offheight = width, height
        if fast:
            quality.offsamples = 0
        if fast or not np.any(self._model.light_castshadow):
            quality.shadowsize = 0
        for name, array in arrays.items():
            array[:] = self._unseen[name]
        try:
            yield
        finally:
            quality.offsamples, quality.shadowsize, size.offwidth, size.offheight = saved
            for name, array in arrays.items():
                array[:] = kept[name]

    def _update(self, data: mujoco.MjData, camera: mujoco.MjvCamera) -> None:
        # Once a camera: lights follow it.
        mujoco.mjv_updateScene(
            self._model, data, self._option, None, camera, _ALL_CATEGORIES, self._scene
        )

    def draw(self, data: mujoco.MjData, camera: mujoco.MjvCamera, pixels: np.ndarray) -> None:
        """Fill ``pixels``, uint8 (height, width, 3), first row at the bottom."""
        self._update(data, camera)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, self._rect, self._context)

    def free(self) -> None:
        """Free what the painter holds in the OpenGL context."""
        self._context.free()


class GeometryPainter(MujocoPainter):
    """Draws how far things are, and which geom is seen, as ``mujoco.Renderer`` does for both."""

    # Textures, which take hundreds of megabytes.
    _unseen = {"tex_width": 1, "tex_height": 1}

    def __init__(self, shared: SharedModel, width: int, height: int) -> None:
        """Upload the model; the caller holds its lock, an OpenGL context is current."""
        super().__init__(shared, width, height, fast=True)
        for flag in (mujoco.mjtRndFlag.mjRND_SEGMENT, mujoco.mjtRndFlag.mjRND_IDCOLOR):
            self._scene.flags[flag] = 1
        self._option.sitegroup[:] = 0  # markers and lamps, no things
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        self._colours = np.empty((height, width, 3), np.uint8)
        self._nearness = np.empty((height, width), np.float32)

    def draw_geometry(
        self, data: mujoco.MjData, camera: mujoco.MjvCamera
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return depth and geoms, new arrays with the first row on top.

        Returns:
            (height, width) float32, metres along the camera's axis, of the far plane where nothing
            is; (height, width) int32 geom ids, -1 where nothing is.
        """
        self._update(data, camera)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        mujoco.mjr_readPixels(self._colours, self._nearness, self._rect, self._context)
        weights = np.array([1, 1 << 8, 1 << 16], np.int32)
        numbers = self._colours[::-1].astype(np.int32) @ weights
        geoms = self._scene.geoms[: self._scene.ngeom]
        ids = np.full(len(geoms) + 1, -1, np.int32)
        for geom in geoms:
            if geom.objtype == mujoco.mjtObj.mjOBJ_GEOM:
                ids[geom.segid + 1] = geom.objid
        return self._metres(self._nearness[::-1]), ids[numbers]

    def _metres(self, nearness: np.ndarray) -> np.ndarray:
        """Undo OpenGL's projection, reversed: 1 at the near plane, 0 at the far one."""
        extent, planes = self._model.stat.extent, self._model.vis.map
        near, far = np.float32(planes.znear * extent), np.float32(planes.zfar * extent)
        # In float32, as glFrustum has them.
        c = np.float32(0.5) * (far + near) / (far - near) - np.float32(0.5)
        d = np.float32(0.5) * (np.float32(2) * far * near) / (far - near)
        metres: np.ndarray = (d / (nearness.astype(np.float64) + c)).astype(np.float32)
        return metres
