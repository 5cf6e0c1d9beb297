"""Two painters of one model side by side: MuJoCo's own and the software painter, or two of it."""

from __future__ import annotations

from functools import partial

import mujoco
import numpy as np

from vla_gym.sim.model_io import SharedModel
from vla_gym.sim.rendering.mujoco_painter import MujocoPainter
from vla_gym.sim.rendering.renderer import _new_gl_context
from vla_gym.sim.rendering.software import SoftwarePainter


class PainterPair:
    """Draws with both painters, each in an OpenGL context of its own; coarse: fast, then coarse."""

    def __init__(
        self, shared: SharedModel, size: int, *, fast: bool = False, coarse: bool = False
    ) -> None:
        self.shared, self.size = shared, size
        self.contexts, self.painters = [], []
        one = partial(SoftwarePainter if coarse else MujocoPainter, fast=fast or coarse)
        other = partial(SoftwarePainter, fast=fast or coarse, coarse=coarse)
        for kind in (one, other):
            context = _new_gl_context(size, size)
            context.make_current()
            self.contexts.append(context)
            self.painters.append(kind(shared, size, size))
        assert self.painters[1].usable
        self._images = np.zeros((2, size, size, 3), np.uint8)

    def draw(self, data: mujoco.MjData, camera: mujoco.MjvCamera) -> tuple[np.ndarray, np.ndarray]:
        """Return both images, (size, size, 3) each."""
        for context, painter, image in zip(self.contexts, self.painters, self._images, strict=True):
            context.make_current()
            painter.draw(data, camera, image)
        return self._images[0].copy(), self._images[1].copy()

    def triangles_drawn(self, of: int = 1) -> int:
        """Return how many triangles of meshes a software painter's last image took."""
        painter = self.painters[of]
        buffers, count = painter._buffers, painter._scene.ngeom
        drawn = buffers.first[:count] >= 0
        runs = zip(buffers.first[:count][drawn], buffers.end[:count][drawn], strict=True)
        return sum(int(buffers.runs[first:end, 1].sum()) for first, end in runs) // 3

    def close(self) -> None:
        for context, painter in zip(self.contexts, self.painters, strict=True):
            context.make_current()
            painter.free()
            context.free()


def fixed_camera(model: mujoco.MjModel, name: str) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
    camera.fixedcamid = model.camera(name).id
    return camera


def random_camera(rng: np.random.Generator, centre: np.ndarray) -> mujoco.MjvCamera:
    """Return a free camera: far away, close, or inside of something."""
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = centre + rng.normal(scale=0.3, size=3)
    camera.distance = float(np.exp(rng.uniform(np.log(0.02), np.log(4.0))))
    camera.azimuth, camera.elevation = rng.uniform(-180, 180), rng.uniform(-89, 89)
    return camera


def scatter(
    model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator, near: np.ndarray
) -> None:
    """Put all joints anywhere: some objects far out, some right at a point."""
    for joint in range(model.njnt):
        address = int(model.jnt_qposadr[joint])
        if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE:
            scale = rng.choice([0.01, 0.1, 0.5, 30.0])
            data.qpos[address : address + 3] = near + rng.normal(scale=scale, size=3)
            quat = rng.normal(size=4)
            data.qpos[address + 3 : address + 7] = quat / np.linalg.norm(quat)
        else:
            low, high = model.jnt_range[joint] if model.jnt_limited[joint] else (-3.0, 3.0)
            data.qpos[address] = rng.uniform(low - 0.05, high + 0.05)
    mujoco.mj_kinematics(model, data)
    mujoco.mj_camlight(model, data)
