"""The exact control loop: upstream's calls in upstream's order, bit for bit.

One control step is, for each of 25 substeps, ``mj_forward`` (the environment), ``mj_forward``
again (the controller's update), the controller's torques, ``mj_step``. Every array has the memory
layout and every product the library (NumPy's BLAS, or numba's) that upstream's has, because these
decide the last bit. Nothing here is made for speed: see :mod:`vla_gym.sim.osc_fast`.
"""

from __future__ import annotations

import mujoco
import numpy as np

from vla_gym.sim.controller_data import (
    SAMPLED_SUBSTEP,
    ArmReading,
    ControllerState,
    StepTrace,
    controller_gains,
    has_rotation,
    rotation_delta,
    scale_arm_action,
)
from vla_gym.sim.osc_fast import null_torques, operational_inertia, orientation_error
from vla_gym.suites.libero.spec import RobotSpec


class ExactController:
    """Runs control steps on one MjData as upstream does."""

    def __init__(
        self, model: mujoco.MjModel, data: mujoco.MjData, robot: RobotSpec, trace: StepTrace
    ) -> None:
        """Bind to ``data``, which must outlive this object; ``trace`` is written."""
        self._model, self._data, self._robot, self._trace = model, data, robot, trace
        self._gains = controller_gains(robot)
        self._site = int(model.site(robot.eef_site).id)
        # Lists: upstream indexes with lists, which decides the layout of the result.
        self._qpos_index = [int(i) for i in robot.joint_qpos]
        self._qvel_index = [int(i) for i in robot.joint_qvel]
        self._actuators = [int(i) for i in robot.joint_actuators]
        self._gripper_actuators = [int(i) for i in robot.gripper_actuators]

    def step(self, action: np.ndarray, state: ControllerState) -> None:
        """Execute one control step.

        Args:
            action: (7,) float64, finite.
            state: Goal state of the controller, changed in place.
        """
        model, data, trace = self._model, self._data, self._trace
        trace.start[:] = data.qpos
        for substep in range(self._robot.substeps):
            mujoco.mj_forward(model, data)
            reading, state.stale = state.stale or self.read(), None
            if substep == 0:
                scaled = scale_arm_action(action, self._robot)
                if has_rotation(scaled):
                    state.goal_mat[:] = np.dot(rotation_delta(scaled[3:]), reading.mat)
                state.goal_pos[:] = reading.pos + scaled[:3]
            torques = self._torques(reading, state)
            torques = np.clip(torques, self._robot.torque_low, self._robot.torque_high)
            self._move_gripper(action[6], state)
            data.ctrl[self._actuators] = torques
            if substep == SAMPLED_SUBSTEP:
                trace.sampled[:] = data.qpos
            trace.qpos[:], trace.qvel[:] = data.qpos, data.qvel
            mujoco.mj_step(model, data)

    def read(self) -> ArmReading:
        """Run ``mj_forward`` and read the arm."""
        model, data, nv = self._model, self._data, self._model.nv
        mujoco.mj_forward(model, data)
        jac_p, jac_r = np.zeros((3, nv)), np.zeros((3, nv))
        mujoco.mj_jacSite(model, data, jac_p, jac_r, self._site)
        mass = np.empty((nv, nv))
        mujoco.mj_fullM(model, mass, data.qM)
        return ArmReading(
            pos=np.array(data.site_xpos[self._site]),
            mat=np.array(data.site_xmat[self._site].reshape([3, 3])),
            velocity=np.dot(jac_p, data.qvel),
            spin=np.dot(jac_r, data.qvel),
            jac_pos=np.array(jac_p[:, self._qvel_index]),
            jac_rot=np.array(jac_r[:, self._qvel_index]),
            mass=mass[self._qvel_index, :][:, self._qvel_index],
            joint_pos=np.array(data.qpos[self._qpos_index]),
            joint_vel=np.array(data.qvel[self._qvel_index]),
        )

    def _torques(self, arm: ArmReading, state: ControllerState) -> np.ndarray:
        """Return the arm's (7,) torques before clipping."""
        kp, kd = self._gains
        # Column-major like its parts: the layout decides the last bit of the products.
        jac = np.array(np.vstack([arm.jac_pos, arm.jac_rot]))
        error = orientation_error(np.array(state.goal_mat), arm.mat)
        force = (state.goal_pos - arm.pos) * kp[0:3] + (-arm.velocity) * kd[0:3]
        torque = error * kp[3:6] + (-arm.spin) * kd[3:6]
        inertia_pos, inertia_rot, projection = operational_inertia(
            arm.mass, jac, arm.jac_pos, arm.jac_rot
        )
        wrench = np.concatenate([np.dot(inertia_pos, force), np.dot(inertia_rot, torque)])
        torques = np.dot(jac.T, wrench) + self._data.qfrc_bias[self._qvel_index]
        torques += null_torques(
            arm.mass, projection, state.nullspace_qpos, arm.joint_pos, arm.joint_vel
        )
        return torques

    def _move_gripper(self, action: float, state: ControllerState) -> None:
        """Integrate the finger command and write the fingers' controls."""
        robot, command = self._robot, state.gripper_command
        move = np.array([-1.0, 1.0]) * robot.gripper_speed * np.sign(action)
        command[:] = np.clip(command + move, -1.0, 1.0)
        applied = robot.gripper_bias + robot.gripper_weight * command
        self._data.ctrl[self._gripper_actuators] = applied
