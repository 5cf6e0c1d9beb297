"""History for many environments at once, over any vector environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from vla_gym.wrappers.history_buffer import HistoryBuffer
from vla_gym.wrappers.vector_base import Obs, Step, VectorEpisodeWrapper


class History(VectorEpisodeWrapper):
    """Add the last T frames and actions of the episode to the observations of N environments.

    The observation of one environment is that of :class:`vla_gym.wrappers.History`, bit for bit;
    here every entry has N rows. Any autoreset mode: in SAME_STEP ``infos["final_obs"]`` has the
    history of the episode that ended. Where a worker died (``worker_restarted``), the observation
    and its history are the last ones before the step that was lost.

    Each frame is copied once and each history is the caller's own, also over an environment that
    hands out views of shared memory (``copy=False``); the other keys are passed on as they are.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Obs, np.ndarray, np.ndarray],
        length: int = 4,
        stride: int = 1,
        frames: Sequence[str] = ("wrist",),
    ) -> None:
        """Wrap a vector of environments; see :class:`vla_gym.wrappers.History`."""
        super().__init__(env)
        n, action_space = env.num_envs, env.single_action_space
        self._kept = self._buffer = HistoryBuffer(
            n, length, stride, frames, env.single_observation_space, action_space
        )
        self.single_observation_space = self._buffer.space
        self.observation_space = batch_space(self._buffer.space, n)

    def _convert_reset(
        self, obs: Obs, infos: dict[str, Any], env_ids: np.ndarray
    ) -> tuple[Obs, dict[str, Any]]:
        self._ended[env_ids] = False
        self._buffer.begin(env_ids)
        return self._observe(obs, self._everyone), infos

    def _convert_step(self, result: Step) -> Step:
        obs, rewards, terminations, truncations, infos = result
        env_ids, begun, executed = self._steps(infos, terminations | truncations)
        acted = executed > 0
        who = env_ids[acted]
        self._buffer.act(who, self._actions[who], executed[acted])
        if "final_obs" in infos:
            infos = {**infos, "final_obs": self._observe_final(infos, env_ids)}
        self._buffer.begin(env_ids[begun])
        return self._observe(obs, env_ids), rewards, terminations, truncations, infos

    def _observe_final(self, infos: dict[str, Any], env_ids: np.ndarray) -> np.ndarray:
        """Return the final observations with the histories of the episodes that ended."""
        final_obs: np.ndarray = infos["final_obs"].copy()
        finals = np.flatnonzero(infos["_final_obs"])
        history = self._buffer.read(env_ids[finals])
        for k, row in enumerate(finals.tolist()):
            # Copies: a view would keep the whole batch alive.
            own = {key: rows[k].copy() for key, rows in history.items()}
            final_obs[row] = {**final_obs[row], **own}
        return final_obs

    def _observe(self, obs: Obs, env_ids: np.ndarray) -> Obs:
        self._buffer.see(env_ids, obs)
        return {**obs, **self._buffer.read(env_ids)}
