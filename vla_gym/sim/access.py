"""Read access to a simulation: observations for policies, privileged state for experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mujoco
import numpy as np

from vla_gym.suites.libero.goals import COMPARISONS

if TYPE_CHECKING:
    from vla_gym.suites.libero import TaskModel

# Upstream reads the hand's orientation from the wrist flange, its position from the grip site.
EEF_BODY = "robot0_right_hand"


class SimAccess:
    """Accessors of a simulation; all results are copies in the world frame, metres and radians.

    Body and site poses are those of the last physics substep's start, 2 ms before ``qpos``, as in
    upstream's observations.
    """

    def __init__(self, task_model: TaskModel, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        """Resolve the names that are read often."""
        self.task_model = task_model
        self._model, self._data = model, data
        self._eef_site = model.site(task_model.robot.eef_site).id
        self._eef_body = model.body(EEF_BODY).id
        self._gripper_qpos = np.asarray(task_model.robot.gripper_qpos)
        objects = task_model.objects
        self._fixture_body_ids = [model.body(objects[n].body).id for n in task_model.fixtures]
        self._fixture_pos = model.body_pos[self._fixture_body_ids].copy()
        self._fixture_quat = model.body_quat[self._fixture_body_ids].copy()
        self._free_dofs = {
            name: int(model.joint(spec.joints[-1]).dofadr[0])
            for name, spec in objects.items()
            if not spec.is_fixture
        }

    @property
    def data(self) -> mujoco.MjData:
        """The simulation's own ``MjData``; for goals, rendering and debugging, read only."""
        return self._data

    def _write_model(self) -> None:
        """Write what this simulation keeps in the shared model; hold its lock."""
        model = self._model
        for index, body in enumerate(self._fixture_body_ids):
            model.body_pos[body] = self._fixture_pos[index]
            model.body_quat[body] = self._fixture_quat[index]
        for indicator in self.task_model.indicators:
            compare = COMPARISONS[indicator.comparison]
            values = self._data.qpos[indicator.joint_qpos]
            lit = any(compare(float(v), indicator.threshold) for v in values)
            alpha = indicator.alpha_on if lit else indicator.alpha_off
            model.site_rgba[indicator.site_id, 3] = alpha

    def proprio(self, out: np.ndarray | None = None) -> np.ndarray:
        """Return (8,) float32: grip site position (3), hand axis-angle (3), finger qpos (2).

        Args:
            out: Optional (8,) float32 array to write into.
        """
        out = np.empty(8, np.float32) if out is None else out
        out[:3] = self._data.site_xpos[self._eef_site]
        out[3:6] = axis_angle(self._data.xquat[self._eef_body])
        out[6:8] = self._data.qpos[self._gripper_qpos]
        return out

    @property
    def qpos(self) -> np.ndarray:
        """Joint positions, (nq,)."""
        return self._data.qpos.copy()

    @property
    def qvel(self) -> np.ndarray:
        """Joint velocities, (nv,)."""
        return self._data.qvel.copy()

    def eef_pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Return position (3,) and rotation (3, 3) of the grip site."""
        matrix = self._data.site_xmat[self._eef_site].reshape(3, 3)
        return self._data.site_xpos[self._eef_site].copy(), matrix.copy()

    def body_pos(self, name: str) -> np.ndarray:
        """Return the (3,) position of a body."""
        return self._data.body(name).xpos.copy()

    def body_mat(self, name: str) -> np.ndarray:
        """Return the (3, 3) rotation of a body."""
        return self._data.body(name).xmat.reshape(3, 3).copy()

    def site_pos(self, name: str) -> np.ndarray:
        """Return the (3,) position of a site."""
        return self._data.site(name).xpos.copy()

    def joint_qpos(self, name: str) -> float:
        """Return the position of a hinge or slide joint."""
        return float(self._data.joint(name).qpos[0])

    def object_speeds(self) -> dict[str, float]:
        """Return the speed in m/s of every movable object's root body."""
        qvel = self._data.qvel
        return {n: float(np.linalg.norm(qvel[a : a + 3])) for n, a in self._free_dofs.items()}

    def collision_corners(self, body: str) -> np.ndarray:
        """Return corner points (K, 3) of the boxes around a body's collision geoms.

        Geoms of the bodies below it (a cabinet's drawers) are included; eight corners a geom.
        """
        model, data = self._model, self._data
        root = model.body(body).id
        corners = []
        for geom in range(model.ngeom):
            if not (model.geom_contype[geom] or model.geom_conaffinity[geom]):
                continue
            if not self._is_below(int(model.geom_bodyid[geom]), root):
                continue
            centre, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
            signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, 8).T
            local = centre + signs * half
            corners.append(data.geom_xpos[geom] + local @ data.geom_xmat[geom].reshape(3, 3).T)
        return np.concatenate(corners) if corners else np.empty((0, 3))

    def _is_below(self, body: int, root: int) -> bool:
        """Tell whether ``body`` is ``root`` or one of its descendants."""
        while body not in (0, root):
            body = int(self._model.body_parentid[body])
        return body == root


def axis_angle(quat_wxyz: np.ndarray) -> np.ndarray:
    """Return the rotation vector (3,) of a quaternion (w, x, y, z), angle in [0, 2 pi].

    Upstream's convention: the quaternion's sign is kept, so the angle can exceed pi.
    """
    w = min(max(float(quat_wxyz[0]), -1.0), 1.0)
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return quat_wxyz[1:] * 2.0 * math.acos(w) / sine
