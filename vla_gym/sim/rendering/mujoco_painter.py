"""Draws with MuJoCo's own renderer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mujoco
import numpy as np

from vla_gym.sim.model_io import SharedModel

# As upstream's render context: no collision geoms, at most this many geoms in the scene.
MAX_GEOMS = 1000
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
_ALL_CATEGORIES = mujoco.mjtCatBit.mjCAT_ALL


class MujocoPainter:
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
