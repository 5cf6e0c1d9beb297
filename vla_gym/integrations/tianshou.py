"""A vector environment of ours for Tianshou's collectors, with one VLA for all environments.

Tianshou's own ``SubprocVectorEnv`` works too, with a process and a VLA for each environment.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from tianshou.env import BaseVectorEnv
from tianshou.env.worker import EnvWorker

from vla_gym.errors import ConfigError, InvalidActionError


class TianshouVectorEnv(BaseVectorEnv):
    """Steps and resets some of the environments at a time, as Tianshou's collectors ask.

    Which episodes end is theirs to see: they store the last observation and reset those alone.
    """

    def __init__(self, envs: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        """Take over a vector environment, which is closed with this one.

        Raises:
            ConfigError: If its autoreset mode is not DISABLED, its observation is not flat, or it
                has no ``send`` and ``recv``.
        """
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.DISABLED or not hasattr(envs, "send"):
            raise ConfigError(
                f"Expected a LiberoVectorEnv that does not reset by itself, got {type(envs)} with "
                f"{mode}: make it with gymnasium.make_vec and autoreset_mode='DISABLED'."
            )
        if not isinstance(envs.single_observation_space, gym.spaces.Box):
            raise ConfigError(
                f"Expected a flat observation, got {envs.single_observation_space}: make the "
                "environments with flat=True."
            )
        self.envs: Any = envs
        space = envs.single_action_space
        super().__init__([lambda: None] * envs.num_envs, lambda _: _Spaces(copy.deepcopy(space)))

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:  # noqa: A002
        """Return an attribute of the environments; their spaces are those after all wrappers."""
        ids = self._wrap_id(id)
        if key == "observation_space":
            return [self.envs.single_observation_space] * len(ids)
        if key == "action_space":  # each draws for itself
            return [self.workers[i].get_env_attr(key) for i in ids]
        values = self.envs.get_attr(key)
        return [values[i] for i in ids]

    def reset(self, env_id: Any = None, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        """Reset some environments, all by default."""
        ids = np.asarray(self._wrap_id(env_id))
        mask = np.zeros(self.env_num, bool)
        mask[ids] = True
        options = {**(kwargs.pop("options", None) or {}), "reset_mask": mask}
        obs, infos = self.envs.reset(options=options, **kwargs)
        return obs[ids], _dicts(infos, ids)

    def step(self, action: Any, id: Any = None) -> Any:  # noqa: A002
        """Step some environments, all by default.

        Raises:
            InvalidActionError: If there is not one action for each, or an environment twice.
        """
        ids = np.asarray(self._wrap_id(id))
        if not len(action) == len(ids) == len(set(ids.tolist())):
            raise InvalidActionError(
                f"Expected an action for each of {ids.tolist()}, each once, got {len(action)}."
            )
        if len(ids) == self.env_num:
            order = np.argsort(ids)
            obs, rewards, terminations, truncations, infos = self.envs.step(
                np.asarray(action)[order]
            )
        else:
            self.envs.send(np.asarray(action), ids)
            obs, rewards, terminations, truncations, infos = self.envs.recv(env_ids=ids)
        rows = np.searchsorted(np.sort(ids), ids)
        dicts = _dicts(infos, rows)
        for env, info in zip(ids.tolist(), dicts, strict=True):
            info["env_id"] = env
        return obs[rows], rewards[rows], terminations[rows], truncations[rows], dicts

    def seed(self, seed: int | Sequence[int] | None = None) -> Any:
        """Seed environments and action spaces; all are reset, Tianshou's collectors do it again.

        Returns:
            For each environment what its action space returned, as Tianshou's own do.
        """
        self.envs.reset(seed=seed)
        return super().seed(seed)

    def close(self) -> None:
        """Close the vector environment."""
        super().close()
        self.envs.close()


class _Spaces(EnvWorker):
    """In the place of a worker, of which Tianshou wants one for each environment."""

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.space = action_space
        super().__init__(lambda: None)

    def get_env_attr(self, key: str) -> Any:
        return self.space if key == "action_space" else None

    def set_env_attr(self, key: str, value: Any) -> None:
        raise NotImplementedError("Set attributes through TianshouVectorEnv.envs.set_attr.")

    def send(self, action: Any) -> None:
        raise NotImplementedError

    def reset(self, **kwargs: Any) -> Any:
        raise NotImplementedError

    def render(self, **kwargs: Any) -> Any:
        raise NotImplementedError("Render through TianshouVectorEnv.envs.render.")

    def close_env(self) -> None:
        """Nothing is held here."""


def _dicts(infos: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    """Return the numbers in infos of some rows as an array of dicts, the same keys in each."""
    found = {
        key: values
        for key, values in infos.items()
        if isinstance(values, np.ndarray) and values.dtype != object and f"_{key}" in infos
    }
    return np.array([{key: values[row] for key, values in found.items()} for row in rows.tolist()])
