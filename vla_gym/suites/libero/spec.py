"""Plain data that describes a compiled task: what the simulation and the env read.

Nothing here imports mujoco, robosuite or libero. Arrays are float64 or int64 and read-only by
convention. All lengths are metres, angles radians, quaternions (w, x, y, z).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_gym.suites.protocol import ActionSpec, ProprioSpec

#: Keys in the observation -> names of LIBERO's cameras.
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
#: Translation (1.0 = 5 cm), rotation (1.0 = 0.5 rad), gripper (-1 opens, +1 closes).
ACTION = ActionSpec(
    names=("x", "y", "z", "roll", "pitch", "yaw", "gripper"),
    noop=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0),
    # LIBERO's tasks hardly need rotations beyond 0.3.
    scale=(1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 1.0),
)
#: Position (m) and axis-angle (rad) of the end effector, positions of the finger joints (m).
PROPRIO = ProprioSpec((("eef_pos", 3), ("eef_axis_angle", 3), ("gripper_qpos", 2)))
CONTROL_HZ = 20.0
#: Upstream's evaluations run ten no-ops after an official state.
SETTLE_STEPS = 10


@dataclass(frozen=True)
class RobotSpec:
    """Indices and constants of the Panda, its gripper and upstream's OSC_POSE controller.

    Attributes:
        eef_site: Name of the site that the controller moves (between the finger pads).
        joint_qpos, joint_qvel, joint_actuators: (7,) addresses of the arm.
        gripper_qpos: (2,) addresses of the finger joints in qpos.
        gripper_actuators: (2,) actuator ids of the fingers.
        torque_low, torque_high: (7,) actuator limits in N m.
        gripper_bias, gripper_weight: (2,) ctrl = bias + weight * command, command in [-1, 1].
        gripper_speed: Change of the gripper command per 2 ms substep (0.01).
        init_qpos: (7,) nominal joint positions at reset.
        init_noise: Standard deviation of upstream's gaussian reset noise on them (0.02 rad).
        kp, damping_ratio: controller gains (150, 1).
        position_scale, rotation_scale: action 1.0 in metres (0.05) and radians (0.5).
        substeps: physics steps in one control step (25).
    """

    eef_site: str
    joint_qpos: np.ndarray
    joint_qvel: np.ndarray
    joint_actuators: np.ndarray
    gripper_qpos: np.ndarray
    gripper_actuators: np.ndarray
    torque_low: np.ndarray
    torque_high: np.ndarray
    gripper_bias: np.ndarray
    gripper_weight: np.ndarray
    gripper_speed: float
    init_qpos: np.ndarray
    init_noise: float
    kp: float
    damping_ratio: float
    position_scale: float
    rotation_scale: float
    substeps: int


@dataclass(frozen=True, eq=False)
class SiteIndicator:
    """A site that is shown while an object is turned on, such as a stove's red burner.

    Upstream updates it after every control step and when a state is set.

    Attributes:
        site, site_id: Name and id of the site.
        joint_qpos: (K,) qpos addresses of the object's joints; one is enough.
        comparison, threshold: What a joint must meet, as in ``Predicate``.
        alpha_off, alpha_on: ``site_rgba[site_id, 3]`` while off and on.
    """

    site: str
    site_id: int
    joint_qpos: np.ndarray
    comparison: Literal["<", "<=", ">", ">="]
    threshold: float
    alpha_off: float
    alpha_on: float


@dataclass(frozen=True)
class Layout:
    """A start of an episode before it has settled.

    Attributes:
        qpos: (nq,) positions.
        qvel: (nv,) velocities.
        time: Simulation time in seconds.
        fixture_pos: (F, 3) and fixture_quat: (F, 4), in the order of ``TaskModel.fixtures``.
        nullspace_qpos: (7,) joint positions that the controller's null space pulls towards
            (upstream: the joint positions at ``env.reset``, noise included).
        init_state_id: Index of the official state, or -1 for a sampled layout.
    """

    qpos: np.ndarray
    qvel: np.ndarray
    time: float
    fixture_pos: np.ndarray
    fixture_quat: np.ndarray
    nullspace_qpos: np.ndarray
    init_state_id: int = -1

    def content(self) -> bytes:
        """Return what tells layouts of a scene apart."""
        return b"".join(np.asarray(value, np.float64).tobytes() for value in vars(self).values())
