"""A frozen VLA inside the environment: its RL token and its own action as the observation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from vla_gym.envs.state import WrapperState
from vla_gym.suites import get_task
from vla_gym.wrappers.vla_features import VLAFeatures
from vla_gym.wrappers.vla_state import LastFrames, check_told

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vla.base import FrozenVLA


class FrozenVLAObservation(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Replace camera images by what a frozen VLA makes of them.

    Observation, a Dict of:
        ``rl_token``: (D,) float32, the RL token (arXiv 2604.23073): the VLA's last hidden states
        compressed by a pretrained encoder;
        ``vla_action``: (C, 7) float32 in [-1, 1], the chunk that the VLA itself would execute;
        ``proprio``: (8,) float32, ``task_id`` and whatever else the environment observes (such as
        the histories of :class:`vla_gym.wrappers.History`), as they are;
        with ``keep_images``, ``agentview`` and ``wrist`` too.

    Playing ``vla_action`` back as the action is the VLA's own policy, through exactly the path
    that a learned policy takes. :mod:`vla_gym.wrappers.vector` has the same for many environments.

    The state of a :class:`~vla_gym.vla.StatefulVLA` begins anew at each reset and goes on with each
    step; it is part of :meth:`get_state`.
    """

    def __init__(
        self,
        env: gym.Env[dict[str, Any], np.ndarray],
        vla: str | Path | FrozenVLA = "mini",
        rl_token: str | RLTokenEncoder | None = "auto",
        keep_images: bool = False,
    ) -> None:
        """Wrap a chunked LIBERO environment that observes both cameras.

        Args:
            env: Environment with observations ``agentview``, ``wrist``, ``proprio``, ``task_id``
                and actions (C, 7).
            vla: Name or directory of a VLA, or the model itself.
            rl_token: ``"auto"`` for the encoder that ships with the VLA (the mean hidden state if
                none does), a name or a directory, the encoder itself; None or ``"mean"``.
            keep_images: Whether the camera images stay in the observation.

        Raises:
            ConfigError: If the environment does not fit the VLA, or the encoder does not.
        """
        super().__init__(env)
        self.features = VLAFeatures(
            vla, rl_token, env.observation_space, env.action_space, keep_images
        )
        self.vla, self.rl_token = self.features.vla, self.features.rl_token
        self.observation_space = self.features.space
        self._last = LastFrames(self.features, 1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment and let the VLA look at the first frame."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._convert(obs, info.get("instruction"), begins=True), info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute a chunk and let the VLA look at the last frame."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs = self._convert(obs, info.get("instruction"))
        return obs, float(reward), terminated, truncated, info

    def get_state(self) -> Any:
        """Return the wrapped environment's state; of a stateful VLA with its memory."""
        state = self.env.get_wrapper_attr("get_state")()
        if not self.features.memory.is_stateful:
            return state
        return WrapperState(state, type(self).__name__, self._last.save(0))

    def set_state(self, state: Any) -> dict[str, Any]:
        """Go on from a state; return the observation of that moment, exactly if it has a memory.

        Raises:
            ConfigError: If the VLA is stateful, and the state was saved without one.
        """
        (inner,) = self._last.unwrapped([state], type(self).__name__)
        if self.features.memory.is_stateful:
            self._last.check(state.kept)
            obs = self.env.get_wrapper_attr("set_state")(inner)
            self._last.restore(0, state.kept)
            return self._joined(obs)
        obs = self.env.get_wrapper_attr("set_state")(inner)
        suite = self.env.get_wrapper_attr("suite")
        return self._convert(obs, get_task(suite, int(obs["task_id"])).instruction)

    def _convert(
        self, obs: dict[str, Any], instruction: str | None, *, begins: bool = False
    ) -> dict[str, Any]:
        made = self.features(
            {view: obs[view][None] for view in self.features.views},
            check_told([instruction]),
            obs["proprio"][None],
            [0],
            [begins],
        )
        self._last.instructions[0] = instruction
        for key, rows in self._last.made.items():
            rows[:] = made[key]
        return self._joined(obs)

    def _joined(self, obs: dict[str, Any]) -> dict[str, Any]:
        made = {key: rows[0].copy() for key, rows in self._last.made.items()}
        return {**made, **{key: obs[key] for key in self.features.kept}}
