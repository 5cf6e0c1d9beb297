"""What both controller implementations share: goal state, gains, and action scaling."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field

import numba
import numpy as np

from vla_gym.suites.libero.spec import RobotSpec

ARM_DIM = 6
# The substep of a control step, counted from 0, whose end upstream's observations show. robosuite
# samples when a whole control step's time has passed since the last sample; LIBERO's reset and
# set_init_state sample once more each, which puts every later sample 2 of 25 substeps before the
# end (Observable.update, MujocoEnv._update_observables).
SAMPLED_SUBSTEP = 23
# Squared norm below which upstream treats a float32 quaternion as no rotation.
_QUAT_EPS = np.finfo(float).eps * 4.0


@dataclass(frozen=True)
class ArmReading:
    """What the controller reads of the arm before it computes torques.

    Attributes:
        pos: (3,) and mat: (3, 3) pose of the grip site, world frame.
        velocity: (3,) and spin: (3,) of the grip site.
        jac_pos, jac_rot: (3, 7) Jacobians of the grip site, column-major.
        mass: (7, 7) mass matrix of the arm, column-major.
        joint_pos, joint_vel: (7,).
    """

    pos: np.ndarray
    mat: np.ndarray
    velocity: np.ndarray
    spin: np.ndarray
    jac_pos: np.ndarray
    jac_rot: np.ndarray
    mass: np.ndarray
    joint_pos: np.ndarray
    joint_vel: np.ndarray


@dataclass
class ControllerState:
    """What the controller remembers between control steps.

    Attributes:
        goal_pos: (3,) target position of the grip site, world frame, metres.
        goal_mat: (3, 3) target orientation of the grip site. It changes only with an action that
            rotates; otherwise the last target is held.
        gripper_command: (2,) integrated finger commands in [-1, 1].
        nullspace_qpos: (7,) joint positions that the null space pulls towards.
        stale: Upstream's controller reads the arm when it is made, at the reset posture, and does
            not read it again before its first torques: an official state that is set in between
            goes unnoticed for one substep, and the first goal starts from the reset posture. The
            reading to use for that substep; None after the first control step.
    """

    goal_pos: np.ndarray = field(default_factory=lambda: np.zeros(3))
    goal_mat: np.ndarray = field(default_factory=lambda: np.eye(3))
    gripper_command: np.ndarray = field(default_factory=lambda: np.zeros(2))
    nullspace_qpos: np.ndarray = field(default_factory=lambda: np.zeros(7))
    stale: ArmReading | None = None

    def copy(self) -> ControllerState:
        """Return a copy that shares nothing."""
        return deepcopy(self)


@dataclass(frozen=True)
class StepTrace:
    """Where the joints were at moments of the last control step; the arrays are written in place.

    Attributes:
        start: (nq,) qpos before the first substep: what lamps and hot plates show, which upstream
            switches between control steps.
        sampled: (nq,) qpos before substep ``SAMPLED_SUBSTEP``: images and body poses that upstream
            returns belong to it.
        qpos, qvel: (nq,), (nv,) state before the last substep: what body poses and contacts in
            MjData belong to, and the joint positions that upstream returns.
    """

    start: np.ndarray
    sampled: np.ndarray
    qpos: np.ndarray
    qvel: np.ndarray

    @classmethod
    def of(cls, qpos: np.ndarray, qvel: np.ndarray) -> StepTrace:
        """Return the trace of a simulation that stands still in a state; it is copied."""
        return cls(qpos.copy(), qpos.copy(), qpos.copy(), qvel.copy())

    def write(self, other: StepTrace) -> None:
        """Take over the values of another one."""
        for name, array in vars(self).items():
            array[:] = getattr(other, name)

    def copy(self) -> StepTrace:
        """Return a copy that shares nothing."""
        return deepcopy(self)


def controller_gains(robot: RobotSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return upstream's kp (6,) and kd (6,): kd = 2 sqrt(kp) times the damping ratio."""
    kp = np.ones(ARM_DIM) * robot.kp
    return kp, 2 * np.sqrt(kp) * robot.damping_ratio


def scale_arm_action(action: np.ndarray, robot: RobotSpec) -> np.ndarray:
    """Return the clipped and scaled arm part of an action (7,) float64.

    Returns:
        (6,) position delta in metres and rotation vector in radians.
    """
    scale = np.array([robot.position_scale] * 3 + [robot.rotation_scale] * 3)
    # Adding 0.0 turns a negative zero into a plain one, as upstream's output offset does.
    return np.clip(action[:ARM_DIM], -1.0, 1.0) * scale + 0.0


def has_rotation(scaled: np.ndarray) -> bool:
    """Tell of a scaled arm action (6,) whether it asks for a new orientation target."""
    return bool(np.any(scaled[3:] != 0.0))


@numba.njit(cache=True)
def _quat_to_mat(quat_xyzw: np.ndarray) -> np.ndarray:  # pragma: no cover - compiled
    """Return the rotation matrix of a quaternion; products in single precision as upstream's."""
    q = quat_xyzw.astype(np.float32)[np.array([3, 0, 1, 2])]
    norm = np.dot(q, q)
    mat = np.eye(3)
    if norm < _QUAT_EPS:
        return mat
    q *= math.sqrt(2.0 / norm)
    w, x, y, z = q[0], q[1], q[2], q[3]
    mat[0, 0] = 1.0 - y * y - z * z
    mat[1, 1] = 1.0 - x * x - z * z
    mat[2, 2] = 1.0 - x * x - y * y
    mat[0, 1], mat[1, 0] = x * y - z * w, x * y + z * w
    mat[0, 2], mat[2, 0] = x * z + y * w, x * z - y * w
    mat[1, 2], mat[2, 1] = y * z - x * w, y * z + x * w
    return mat


def rotation_delta(rotation_vector: np.ndarray) -> np.ndarray:
    """Return the (3, 3) rotation matrix of a rotation vector (3,) in radians.

    Single precision inside, because upstream's conversion is: the target orientation would
    otherwise differ by 1e-8 from upstream's.
    """
    angle = np.linalg.norm(rotation_vector)
    quat = np.zeros(4)
    if math.isclose(angle, 0.0):
        quat[3] = 1.0
        return _quat_to_mat(quat)
    axis = rotation_vector / angle
    quat[3] = np.cos(angle / 2.0)
    quat[:3] = axis * np.sin(angle / 2.0)
    return _quat_to_mat(quat)
