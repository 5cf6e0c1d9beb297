"""The fast control loop: a control step in one compiled call.

Upstream (robosuite's ``MujocoEnv.step`` and ``OperationalSpaceController``) runs, for each of the
25 substeps of a control step, two ``mj_forward`` and one ``mj_step``. Here a substep is
``mj_step1`` (positions, velocities, bias forces), the controller's torques, ``mj_step2``. The
physics is the same: ``mj_forward`` leaves no trace that a step depends on. The arm is read as
upstream reads it; torques equal upstream's to rounding, and near singular postures, where they
hang on it, to the last bit (see :mod:`vla_gym.sim.operational_space`).
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from vla_gym.sim.compiled import announce, compiled, copy_matrix, copy_vector
from vla_gym.sim.controller_data import (
    SAMPLED_SUBSTEP,
    ControllerState,
    StepTrace,
    controller_gains,
    has_rotation,
    rotation_delta,
    scale_arm_action,
)
from vla_gym.sim.mj_native import mj_jacSite, mj_step1, mj_step2
from vla_gym.sim.operational_space import (
    NULLSPACE_KP,
    null_torques,
    operational_inertia,
    operational_torques,
    orientation_error,
)
from vla_gym.suites.libero.spec import RobotSpec

Arrays = tuple[np.ndarray, ...]

_NO_ROTATION = np.eye(3)


@compiled
def _read_arm(
    model: int, data: int, views: Arrays, robot: tuple[Any, ...], work: Arrays, arm: Arrays
) -> None:
    """Fill ``arm`` (the fields of :class:`ArmReading`) from the present state."""
    qpos, qvel, _, site_xpos, site_xmat, _, qM = views
    site, _, q_adr, v_adr, mass_adr = robot[0:5]
    jac_p, jac_r = work[0:2]
    pos, mat, velocity, spin, jac_pos, jac_rot, mass, joint_pos, joint_vel = arm
    mj_jacSite(model, data, jac_p.ctypes.data, jac_r.ctypes.data, site)
    copy_vector(site_xpos[site], pos)
    copy_matrix(site_xmat[site].reshape(3, 3), mat)
    copy_vector(np.dot(jac_p, qvel), velocity)
    copy_vector(np.dot(jac_r, qvel), spin)
    for i in range(7):
        joint_pos[i] = qpos[q_adr[i]]
        joint_vel[i] = qvel[v_adr[i]]
        for k in range(3):
            jac_pos[k, i] = jac_p[k, v_adr[i]]
            jac_rot[k, i] = jac_r[k, v_adr[i]]
        for j in range(7):
            mass[i, j] = qM[mass_adr[i, j]]


@compiled
def _torques(arm: Arrays, goal: Arrays, gains: Arrays, work: Arrays, torques: np.ndarray) -> None:
    """Add the task's and the null space's to (7,) ``torques``, which hold the bias forces."""
    pos, mat, velocity, spin, jac_pos, jac_rot, mass, joint_pos, joint_vel = arm
    goal_pos, goal_mat, _, null_qpos = goal
    kp, kd = gains
    wrench, posture = work[0:2]
    error = orientation_error(goal_mat, mat)
    for k in range(3):
        wrench[k] = (goal_pos[k] - pos[k]) * kp[k] - velocity[k] * kd[k]
        wrench[k + 3] = error[k] * kp[k + 3] - spin[k] * kd[k + 3]
    damping = np.sqrt(NULLSPACE_KP) * 2
    for i in range(7):
        posture[i] = NULLSPACE_KP * (null_qpos[i] - joint_pos[i]) - damping * joint_vel[i]
    if operational_torques((jac_pos, jac_rot, mass), wrench, posture, work[2:], torques):
        return
    # As upstream computes them, to the last bit.
    jac = np.empty((7, 6)).T
    copy_matrix(jac_pos, jac[0:3])
    copy_matrix(jac_rot, jac[3:6])
    inertia_pos, inertia_rot, projection = operational_inertia(mass, jac, jac_pos, jac_rot)
    copy_vector(np.dot(inertia_pos, wrench[:3]), wrench[:3])
    copy_vector(np.dot(inertia_rot, wrench[3:]), wrench[3:])
    null = null_torques(mass, projection, null_qpos, joint_pos, joint_vel)
    copy_vector(np.dot(jac.T, wrench) + torques + null, torques)


@compiled
def _run(
    model: int,
    data: int,
    views: Arrays,
    robot: tuple[Any, ...],
    gains: Arrays,
    goal: Arrays,
    work: Arrays,
    trace: Arrays,
    target: tuple[Any, ...],
    arm: Arrays,
    is_read: bool,
) -> None:
    """Run one control step.

    Args:
        model: Address of the mjModel.
        data: Address of the mjData.
        views: Arrays of the mjData, see :class:`FastController`.
        robot: Indices and constants.
        gains: kp (6,), kd (6,).
        goal: Goal position, goal matrix, gripper command, null-space target; written.
        work: See :class:`FastController`; written.
        trace: The fields of a :class:`StepTrace`; written.
        target: Position delta, rotation matrix, whether it rotates, sign of the gripper action.
        arm: The fields of an :class:`ArmReading`; written.
        is_read: Whether ``arm`` holds what the first substep uses.
    """
    qpos, qvel, ctrl, _, _, qfrc_bias, _ = views
    _, substeps, _, v_adr, _, act, low, high, grip_act, grip_bias, grip_weight, speed = robot
    goal_pos, goal_mat, grip_command, _ = goal
    start_qpos, sampled_qpos, last_qpos, last_qvel = trace
    delta_pos, delta_mat, rotates, grip_sign = target
    pos, mat = arm[0:2]
    torques = np.empty(7)

    copy_vector(qpos, start_qpos)
    for substep in range(substeps):
        if substep == SAMPLED_SUBSTEP:
            copy_vector(qpos, sampled_qpos)
        if substep == substeps - 1:
            copy_vector(qpos, last_qpos)
            copy_vector(qvel, last_qvel)
        mj_step1(model, data)
        if not (is_read and substep == 0):
            _read_arm(model, data, views, robot, work, arm)
        if substep == 0:
            if rotates:
                copy_matrix(np.dot(delta_mat, mat), goal_mat)
            copy_vector(pos + delta_pos, goal_pos)
        for i in range(7):
            torques[i] = qfrc_bias[v_adr[i]]
        _torques(arm, goal, gains, work[2:], torques)
        for i in range(7):
            ctrl[act[i]] = min(max(torques[i], low[i]), high[i])
        for i in range(2):
            move = (-1.0 if i == 0 else 1.0) * speed * grip_sign
            grip_command[i] = min(max(grip_command[i] + move, -1.0), 1.0)
            ctrl[grip_act[i]] = grip_bias[i] + grip_weight[i] * grip_command[i]
        mj_step2(model, data)


def mass_addresses(model: mujoco.MjModel, dofs: np.ndarray) -> np.ndarray:
    """Return where ``qM`` holds the mass matrix of N joints that are one chain, (N, N)."""
    address = {}
    for dof in dofs:
        other = dof
        for entry in range(model.dof_Madr[dof], model.nM):  # from the joint to the root
            address[dof, other] = address[other, dof] = entry
            other = model.dof_parentid[other]
            if other < 0:
                break
    return np.array([[address[row, column] for column in dofs] for row in dofs])


class FastController:
    """Runs control steps on one MjData with the compiled loop."""

    def __init__(
        self, model: mujoco.MjModel, data: mujoco.MjData, robot: RobotSpec, trace: StepTrace
    ) -> None:
        """Bind to the arrays of ``data``, which must outlive this object; ``trace`` is written."""
        self._model, self._data, self._robot = model, data, robot
        self._gains = controller_gains(robot)
        self._views = (
            data.qpos,
            data.qvel,
            data.ctrl,
            data.site_xpos,
            data.site_xmat,
            data.qfrc_bias,
            data.qM,
        )
        index = lambda values: np.ascontiguousarray(values, dtype=np.int64)  # noqa: E731
        real = lambda values: np.ascontiguousarray(values, dtype=np.float64)  # noqa: E731
        self._constants = (
            int(model.site(robot.eef_site).id),
            int(robot.substeps),
            index(robot.joint_qpos),
            index(robot.joint_qvel),
            index(mass_addresses(model, robot.joint_qvel)),
            index(robot.joint_actuators),
            real(robot.torque_low),
            real(robot.torque_high),
            index(robot.gripper_actuators),
            real(robot.gripper_bias),
            real(robot.gripper_weight),
            float(robot.gripper_speed),
        )
        announce(_run, "the physics loop")
        pose, speeds = (np.zeros(3), np.zeros((3, 3))), (np.zeros(3), np.zeros(3))
        # Transposed storage: upstream's fancy indexing leaves these matrices column-major.
        matrices = tuple(np.zeros((7, rows)).T for rows in (3, 3, 7))
        self._arm = (*pose, *speeds, *matrices, np.zeros(7), np.zeros(7))
        self._trace = tuple(vars(trace).values())
        # Site Jacobians; wrench and posture; what `operational_torques` needs.
        task, joints, site = (6,), (7,), (3, model.nv)
        needed = ((7, 7), (6, 7), (6, 6), (6, 6), (3, 3), (6,))
        self._work = tuple(np.zeros(shape) for shape in (site, site, task, joints, *needed))

    def step(self, action: np.ndarray, state: ControllerState) -> None:
        """Execute one control step.

        Args:
            action: (7,) float64, finite.
            state: Goal state of the controller, changed in place.
        """
        scaled = scale_arm_action(action, self._robot)
        rotates = has_rotation(scaled)
        delta_mat = rotation_delta(scaled[3:]) if rotates else _NO_ROTATION
        target = (scaled[:3], delta_mat, rotates, float(np.sign(action[6])))
        goal = (state.goal_pos, state.goal_mat, state.gripper_command, state.nullspace_qpos)
        stale, state.stale = state.stale, None
        if stale is not None:
            for array, value in zip(self._arm, vars(stale).values(), strict=True):
                array[:] = value
        _run(
            self._model._address,
            self._data._address,
            self._views,
            self._constants,
            self._gains,
            goal,
            self._work,
            self._trace,
            target,
            self._arm,
            stale is not None,
        )
