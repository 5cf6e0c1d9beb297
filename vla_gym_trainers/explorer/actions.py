"""A vector wrapper through which an explorer's chunks can be asked for, beside any other policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.errors import ConfigError
from vla_gym.rollout.policies import Info
from vla_gym.wrappers.vector_base import Obs, Step, VectorEpisodeWrapper
from vla_gym.wrappers.vla_state import heard
from vla_gym_trainers.on_policy.validation import PolicyPlayer
from vla_gym_trainers.rollout.memory import MEMORY, PREVIOUS_ACTION


class ExplorerActions(VectorEpisodeWrapper):
    """Knows what an explorer would do in N environments; changes nothing of what they return.

    It goes below :class:`vla_gym.wrappers.vector.FrozenVLAObservation`, where there are frames.
    :meth:`explore` computes chunks only when it is called; in an environment it must be called for
    every chunk of an episode, from the first one on, for the explorer's memory to be right.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Obs, np.ndarray, np.ndarray],
        explorer: PolicyPlayer,
        share: float = 1.0,
    ) -> None:
        """Wrap a vector of chunked environments.

        Args:
            env: Its infos hold ``instruction``, its observations cameras, proprio and task.
            explorer: See :func:`.player.load_player`.
            share: Of the environments that explore, the first ones, in [0, 1]; at least one of
                them, but for 0.

        Raises:
            ConfigError: If the explorer's chunks or images are others.
        """
        super().__init__(env)
        observed, chunk = env.single_observation_space, env.single_action_space.shape or (0,)
        found = observed.spaces if isinstance(observed, spaces.Dict) else {}
        cameras = [name for name in explorer.cameras if name in found]
        sizes = {found[name].shape for name in cameras} or {None}
        size = explorer.image_size
        if chunk[0] != explorer.chunk_len or sizes != {(size, size, 3)}:
            raise ConfigError(
                f"The explorer acts in chunks of {explorer.chunk_len} on images of {size} pixels, "
                f"these environments have actions {chunk} and images {sorted(map(str, sizes))}: "
                f"give them chunk_len={explorer.chunk_len} and no stride, or another explorer."
            )
        n = env.num_envs
        self.explorer, self._count = explorer, max(round(share * n), share > 0.0)
        names = (*cameras, "proprio", "task_id")
        self._seen = {k: np.zeros((n, *(found[k].shape or ())), found[k].dtype) for k in names}
        self._texts = np.full(n, None, dtype=object)
        self._counts = np.zeros((n, 2), np.int64)  # the episode, and the chunk in it

    def explore(self, actions: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Return chunks (n, C, A) for n environments: the explorer's where it is its turn."""
        mine = env_ids < self._count
        if not mine.any():
            return actions
        ids = env_ids[mine]
        infos = [
            Info(
                env_id=i,
                suite="",
                task_id=int(self._seen["task_id"][i]),
                init_state_id=-1,
                seed=int(self._counts[i, 0]) * self.num_envs + i,
                instruction=self._texts[i],
                elapsed_steps=int(self._counts[i, 1]),
            )
            for i in ids.tolist()
        ]
        actions = actions.copy()
        actions[mine] = self.explorer.act({k: v[ids] for k, v in self._seen.items()}, infos)
        return actions

    def _convert_reset(
        self, obs: Obs, infos: dict[str, Any], env_ids: np.ndarray
    ) -> tuple[Obs, dict[str, Any]]:
        self._ended[env_ids] = False
        rows = {key: obs[key][env_ids] for key in self._seen}
        told = {k: v[env_ids] for k, v in infos.items() if k in ("instruction", "_instruction")}
        self._look(rows, told, env_ids, np.ones(len(env_ids), bool))
        return obs, infos

    def _convert_step(self, result: Step) -> Step:
        obs, _, terminations, truncations, infos = result
        ids, begun, _ = self._steps(infos, terminations | truncations)
        self._look(obs, infos, ids, begun)
        return result

    def _look(self, obs: Obs, infos: dict[str, Any], ids: np.ndarray, begun: np.ndarray) -> None:
        """Keep what is to be acted on next."""
        for key, rows in self._seen.items():
            rows[ids] = obs[key]
        self._texts[ids] = heard(self._texts[ids], infos)
        self._counts[ids] += np.where(begun[:, None], [1, 0], [0, 1])
        self._counts[ids[begun], 1] = 0

    def _observe(self, obs: Obs, env_ids: np.ndarray) -> Obs:  # noqa: ARG002
        return obs

    def _save(self, env_id: int) -> dict[str, Any]:
        return {
            "seen": {key: rows[env_id].copy() for key, rows in self._seen.items()},
            "instruction": self._texts[env_id],
            "counts": self._counts[env_id].tolist(),
            "carried": self.explorer.memory.rows([env_id]),
        }

    def _check(self, kept: Mapping[str, Any]) -> None:
        shapes = self.explorer.memory.shapes
        found = {name: value.shape[1:] for name, value in kept["carried"].items()}
        if found != shapes:
            raise ConfigError(
                f"Expected what an explorer remembers as {shapes}, got {found}: both environments "
                "need the same explorer."
            )

    def _restore(self, env_id: int, kept: Mapping[str, Any]) -> None:
        for key, rows in self._seen.items():
            rows[env_id] = kept["seen"][key]
        self._texts[env_id], self._counts[env_id] = kept["instruction"], kept["counts"]
        if carried := kept["carried"]:
            self.explorer.memory.keep([env_id], carried[MEMORY], carried[PREVIOUS_ACTION])
