"""Read access to a simulation: observations for policies, privileged state for experts."""

from __future__ import annotations

import math
from typing import Literal

import mujoco
import numpy as np

from vla_gym.outside import check_words
from vla_gym.sim.controller_data import StepTrace
from vla_gym.sim.model_io import SharedModel
from vla_gym.suites.libero.goals import COMPARISONS, goal_progress
from vla_gym.suites.libero.model import TaskModel

ObservationTiming = Literal["libero", "end"]

# Upstream reads the hand's orientation from the wrist flange, its position from the grip site.
EEF_BODY = "robot0_right_hand"
_CUBE = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, 8).T  # its corners


class SimAccess:
    """Accessors of a simulation; all results are copies in the world frame, metres and radians.

    Body and site poses are those of the last physics substep's start, 2 ms before ``qpos``.

    Attributes:
        observation_timing: ``"libero"``: images and proprioception show what upstream's ``step``
            returns, moments shortly before the control step's end, see :class:`StepTrace`;
            ``"end"``: what is there now.
    """

    def __init__(
        self, task_model: TaskModel, shared: SharedModel, observation_timing: ObservationTiming
    ) -> None:
        """Resolve the names that are read often.

        Raises:
            ConfigError: Unknown ``observation_timing``.
        """
        check_words(observation_timing, ObservationTiming, "observation_timing")
        self.task_model, self.observation_timing = task_model, observation_timing
        self._shared, model = shared, shared.model
        self._model, self._data = model, mujoco.MjData(model)
        self._trace = StepTrace.of(self._data.qpos, self._data.qvel)
        self._eef_site = model.site(task_model.robot.eef_site).id
        self._eef_body = model.body(EEF_BODY).id
        self._gripper_qpos = np.asarray(task_model.robot.gripper_qpos)
        objects = task_model.objects
        fixtures = [model.body(objects[n].body).id for n in task_model.fixtures]
        self._fixture_bodies = np.array(fixtures, np.int64)
        self._fixture_pos = model.body_pos[self._fixture_bodies]
        self._fixture_quat = model.body_quat[self._fixture_bodies]
        self._free_dofs = {
            name: int(model.joint(spec.joints[-1]).dofadr[0])
            for name, spec in objects.items()
            if not spec.is_fixture
        }

    @property
    def data(self) -> mujoco.MjData:
        """The simulation's own ``MjData``; for goals and debugging, read only."""
        return self._data

    def _write_model(self) -> None:
        """Write what this simulation keeps in the shared model; hold its lock."""
        model = self._model
        qpos = self._trace.start if self.observation_timing == "libero" else self._data.qpos
        model.body_pos[self._fixture_bodies] = self._fixture_pos
        model.body_quat[self._fixture_bodies] = self._fixture_quat
        for indicator in self.task_model.indicators:
            compare = COMPARISONS[indicator.comparison]
            values = qpos[indicator.joint_qpos]
            lit = any(compare(float(v), indicator.threshold) for v in values)
            alpha = indicator.alpha_on if lit else indicator.alpha_off
            model.site_rgba[indicator.site_id, 3] = alpha

    def prepare_render(self) -> mujoco.MjData:
        """Write what is this simulation's into the shared model; return the state to observe.

        The caller holds the model's lock from before this until it has drawn or read.
        """
        self._write_model()
        shown, libero = self._shared.shown, self.observation_timing == "libero"
        # A step leaves the poses in MjData where its last substep began.
        shown.qpos[:] = self._trace.sampled if libero else self._data.qpos
        mujoco.mj_kinematics(self._model, shown)
        mujoco.mj_camlight(self._model, shown)
        return shown

    def observed_robot(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return position (3,), quaternion (4,), w first, of the hand, qpos (nq,), qvel (nv,)."""
        joints = self._trace if self.observation_timing == "libero" else self._data
        with self._shared.lock:
            data = self.prepare_render()
            pos, quat = data.site_xpos[self._eef_site], data.xquat[self._eef_body]
            return pos.copy(), quat.copy(), joints.qpos.copy(), joints.qvel.copy()

    def proprio(self) -> np.ndarray:
        """Return (8,) float32: grip site position (3), hand axis-angle (3), finger qpos (2)."""
        pos, quat, qpos, _ = self.observed_robot()
        values = (pos, axis_angle(quat), qpos[self._gripper_qpos])
        return np.concatenate(values).astype(np.float32)

    @property
    def qpos(self) -> np.ndarray:
        """Joint positions, (nq,)."""
        return self._data.qpos.copy()

    @property
    def qvel(self) -> np.ndarray:
        """Joint velocities, (nv,)."""
        return self._data.qvel.copy()

    def progress(self) -> float:
        """Return the share of the goal's predicates that hold now, by upstream's rules."""
        return goal_progress(self.task_model.goal, self._data)

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
        root, corners = model.body(body).id, []
        for geom in np.flatnonzero(model.geom_contype | model.geom_conaffinity).tolist():
            if self._is_below(int(model.geom_bodyid[geom]), root):
                local = model.geom_aabb[geom, :3] + _CUBE * model.geom_aabb[geom, 3:]
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
