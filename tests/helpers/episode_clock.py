"""Observations that tell where in its episode an environment is: what a library's buffer must say.

The environment is the real one; the wrapper makes every second episode end in a success, so that
there are terminations and truncations within a few chunks.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

#: Chunks of an episode that succeeds, and of one that the step limit ends.
SUCCESS_AT, LIMIT = 2, 3
GOES_ON, TERMINATED, TRUNCATED = 0, 1, 2
KEYS = ("clock", "rl_token", "proprio", "vla_action")


class EpisodeClock(gym.Wrapper):
    """Add ``clock`` to the observation: number of the episode, chunks so far, and how it ended."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        box = spaces.Box(-1e6, 1e6, (3,), np.float32)
        self.observation_space = spaces.Dict({**env.observation_space.spaces, "clock": box})
        self.episode = -1

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.episode, self.chunks = self.episode + 1, 0
        return self._tell(obs, GOES_ON), info

    def step(self, action):
        obs, _, _, truncated, info = self.env.step(action)
        self.chunks += 1
        terminated = self.episode % 2 == 1 and self.chunks == SUCCESS_AT
        truncated = truncated and not terminated
        end = TERMINATED if terminated else TRUNCATED if truncated else GOES_ON
        info = {**info, "success": terminated, "is_success": terminated}
        return self._tell(obs, end), float(terminated), terminated, truncated, info

    def _tell(self, obs, end):
        return {**obs, "clock": np.array([self.episode, self.chunks, end], np.float32)}


#: Options of LiberoVLA-* for a library's test.
OPTIONS: dict[str, Any] = {
    "vla": "mini-few",
    "assets": "lite",
    "task_ids": 8,
    "max_control_steps": 8 * LIMIT,
    "env_wrappers": [EpisodeClock],
    "workers": 0,
}
FLAT = {**OPTIONS, "obs_keys": KEYS}


def check_transitions(
    obs: Any, next_obs: Any, rewards: Any, terminated: Any, truncated: Any = None
) -> None:
    """Check transitions as a library has stored them.

    Args:
        obs: (B, >= 3), the clock first.
        next_obs: As ``obs``.
        rewards: (B,).
        terminated: (B,) bool: where the library does not bootstrap.
        truncated: (B,) bool, None if the library does not store it.
    """
    before, after = (np.asarray(x, np.float64).reshape(len(x), -1)[:, :3] for x in (obs, next_obs))
    rewards = np.asarray(rewards, np.float64).reshape(-1)
    terminated = np.asarray(terminated).reshape(-1).astype(bool)
    ends = after[:, 2]
    assert (before[:, 2] == GOES_ON).all(), "a row begins at the end of an episode: a reset row"
    same = before[:, 0] == after[:, 0]
    wrong = np.flatnonzero(~same)
    assert same.all(), f"next observations of another episode: {before[wrong]} -> {after[wrong]}"
    assert (after[:, 1] == before[:, 1] + 1).all(), "a chunk is missing"
    assert (ends == TERMINATED).sum() >= 2 and (ends == TRUNCATED).sum() >= 2
    np.testing.assert_array_equal(terminated, ends == TERMINATED)
    np.testing.assert_array_equal(rewards, ends == TERMINATED)
    if truncated is not None:
        truncated = np.asarray(truncated).reshape(-1).astype(bool)
        np.testing.assert_array_equal(truncated, ends == TRUNCATED)
