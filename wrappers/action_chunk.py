"""Several control steps as one action, over any single-step environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from vla_gym.actions import as_action
from vla_gym.envs.checks import MAX_CHUNK_LEN, as_integer, as_number
from vla_gym.errors import ConfigError


class ActionChunk(gym.Wrapper[Any, np.ndarray, Any, np.ndarray]):
    """Execute a chunk of actions per ``step`` and stop at the episode's end.

    With ``chunk_len=3`` a ``step`` is::

        action (3, *shape)   a0     a1     a2
        reward               r0  +  g r1 + g^2 r2          (g = gamma, 1 if None)
        observation                        the last one
        info                 executed_steps=3, discount=g^3

    and if the episode ends after a1, a2 is never executed, ``executed_steps`` is 2 and
    ``discount`` is g^2. Over ``Libero-*`` it equals the environment's own ``chunk_len``, which is
    faster because it renders only once a chunk.
    """

    def __init__(self, env: gym.Env[Any, Any], chunk_len: int, gamma: float | None = None) -> None:
        """Wrap an environment with a Box action.

        Args:
            env: Environment whose action space is a Box.
            chunk_len: Number of actions in a chunk, at least 1.
            gamma: Discount per inner step in (0, 1], or None for an undiscounted sum.

        Raises:
            ConfigError: If the action space is not a Box, or an argument is out of range.
        """
        super().__init__(env)
        inner = env.action_space
        if not isinstance(inner, spaces.Box):
            raise ConfigError(f"ActionChunk expects a Box action space, got {inner}.")
        as_integer(chunk_len, "chunk_len", 1, MAX_CHUNK_LEN)
        if gamma is not None:
            as_number(gamma, "gamma", 0.0, 1.0, above=True)
        self.chunk_len, self.gamma = chunk_len, gamma
        self.action_space = batch_space(inner, chunk_len)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute the rows of ``action`` (chunk_len, ...) until they or the episode end.

        Raises:
            InvalidActionError: Wrong shape, or a value that is not finite; nothing has moved then.
        """
        rows = as_action(action, self.action_space.shape)
        gamma = 1.0 if self.gamma is None else self.gamma
        total, scale, executed = 0.0, 1.0, 0
        for row in rows:
            obs, reward, terminated, truncated, info = self.env.step(row)
            total += scale * float(reward)
            scale *= gamma
            executed += 1
            if terminated or truncated:
                break
        info = {**info, "executed_steps": executed}
        info.pop("discount", None)  # of the last inner step alone
        if self.gamma is not None:
            info["discount"] = gamma**executed
        return obs, total, terminated, truncated, info
