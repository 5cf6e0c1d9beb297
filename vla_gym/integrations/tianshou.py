"""A vector environment of ours for Tianshou's collectors, with one VLA for all environments.

Tianshou's own ``SubprocVectorEnv`` works too, with a process and a VLA for each environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from tianshou.env import BaseVectorEnv
from tianshou.env.worker import EnvWorker

from vla_gym.errors import ConfigError


class TianshouVectorEnv(BaseVectorEnv):
    """Steps and resets some of the environments at a time, as Tianshou's collectors ask.

    Which episodes end is theirs to see: they store the last observation and reset those alone.
    """

    def __init__(self, envs: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        """Take over a vector environment, which is closed with this one.

        Raises:
            ConfigError: If its autoreset mode is not DISABLED, or it has no ``send`` and ``recv``.
        """
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.DISABLED or not hasattr(envs, "send"):
            raise ConfigError(
                f"Expected a LiberoVectorEnv that does not reset by itself, got {type(envs)} with "
                f"{mode}: make it with gymnasium.make_vec and autoreset_mode='DISABLED'."
            )
        self.envs: Any = envs
        space = envs.single_action_space
        super().__init__([lambda: None] * envs.num_envs, lambda _: _Spaces(space))

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:  # noqa: A002
        """Return an attribute of the environments; their spaces are those after all wrappers."""
        ids = self._wrap_id(id)
        if key in ("observation_space", "action_space"):
            return [getattr(self.envs, f"single_{key}")] * len(ids)
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
        """Step some environments, all by default."""
        ids = np.asarray(self._wrap_id(id))
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
        """Seed the environments; they are reset, Tianshou's collectors do it once more."""
        self.envs.reset(seed=seed)
        return [seed] * self.env_num if seed is None or isinstance(seed, int) else list(seed)

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
