"""The observation of LeRobot's own LIBERO environment; runs in workers, without lerobot."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

#: LeRobot's names of LIBERO's images, by ours.
IMAGES = {"agentview": "image", "wrist": "image2"}
# Shapes of the entries of robot_state.
_STATE: dict[str, dict[str, tuple[int, ...]]] = {
    "eef": {"pos": (3,), "quat": (4,), "mat": (3, 3)},
    "gripper": {"qpos": (2,), "qvel": (2,)},
    "joints": {"pos": (7,), "vel": (7,)},
}
# LeRobot's sign of a new rollout, in the options of a reset.
_NEW_ROLLOUT = "lerobot_new_rollout"


class LeRobotObservation(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Show one task of LIBERO as ``lerobot.envs.libero.LiberoEnv`` does.

    Observation, a Dict of:
        ``pixels``: ``image`` (agentview) and ``image2`` (wrist), (S, S, 3) uint8, first row at the
        bottom, as robosuite has them: LeRobot's ``LiberoProcessorStep`` turns them by 180 degrees;
        ``robot_state``: float64 ``eef`` (``pos`` (3,) in metres, ``quat`` (4,), w last, ``mat``
        (3, 3)), ``gripper`` (``qpos``, ``qvel``, (2,)), ``joints`` (``pos``, ``vel``, (7,)).

    Attributes:
        task, task_description: Name of the present task, and its instruction.
    """

    def __init__(
        self, env: gym.Env[dict[str, Any], np.ndarray], names: dict[str, str], robot_state: bool
    ) -> None:
        """Wrap a LIBERO environment.

        Args:
            env: ``LiberoEnv`` with single control steps.
            names: LeRobot's names of its cameras.
            robot_state: Whether to observe ``robot_state``.
        """
        super().__init__(env)
        self._names, self._robot_state = names, robot_state
        self._base: Any = env.unwrapped
        self._task_id: int | None = None
        images = {name: env.observation_space[camera] for camera, name in names.items()}  # type: ignore[index]
        fields: dict[str, spaces.Space[Any]] = {"pixels": spaces.Dict(images)}
        if robot_state:
            fields["robot_state"] = spaces.Dict(
                {
                    part: spaces.Dict(
                        {key: spaces.Box(-np.inf, np.inf, s, np.float64) for key, s in keys.items()}
                    )
                    for part, keys in _STATE.items()
                }
            )
        self.observation_space = spaces.Dict(fields)

    @property
    def _task(self) -> Any:
        """The task of the last reset; before it, the first one."""
        base = self._base
        return base.tasks[0] if self._task_id is None else base.task_model.task

    @property
    def task(self) -> str:
        """See the class."""
        return str(self._task.name)

    @property
    def task_description(self) -> str:
        """See the class."""
        return str(self._task.instruction)

    @property
    def _max_episode_steps(self) -> int:
        """Step limit, by the name that LeRobot asks for."""
        return int(self._base.max_control_steps or self._task.max_control_steps)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; one that follows by itself stays with the task that was asked for."""
        options = {key: v for key, v in (options or {}).items() if key != _NEW_ROLLOUT}
        if self._task_id is not None:
            options = {"task_id": self._task_id} | options
        obs, info = self.env.reset(seed=seed, options=options)
        self._task_id = int(info["task_id"])
        return self._observation(obs), info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Execute a control step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._observation(obs), reward, terminated, truncated, info

    def _observation(self, obs: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "pixels": {name: obs[camera][::-1] for camera, name in self._names.items()}
        }
        if self._robot_state:
            sim = self._base.sim
            robot, model = sim.task_model.robot, sim.data.model
            fingers = model.jnt_dofadr[np.searchsorted(model.jnt_qposadr, robot.gripper_qpos)]
            pos, quat, qpos, qvel = sim.observed_robot()
            found["robot_state"] = {
                # The orientation is the controller's, of the last substep.
                "eef": {"pos": pos, "quat": np.roll(quat, -1), "mat": sim.eef_pose()[1]},
                "gripper": {"qpos": qpos[robot.gripper_qpos], "qvel": qvel[fingers]},
                "joints": {"pos": qpos[robot.joint_qpos], "vel": qvel[robot.joint_qvel]},
            }
        return found
