"""LIBERO's spaces without a simulator, for tests of wrappers: every frame is unlike any other."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces

INSTRUCTIONS = ("open the drawer", "push the plate", "turn on the stove")


class PictureEnv(gym.Env):
    """Pictures that tell seed, episode and step apart; short episodes of random length.

    ``delay``: seconds that a step sleeps, in place of a simulation.
    """

    def __init__(self, size: int = 4, chunk_len: int = 2, delay: float = 0.0) -> None:
        image = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "agentview": image,
                "wrist": image,
                "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32),
                "task_id": spaces.Discrete(len(INSTRUCTIONS)),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (chunk_len, 7), np.float32)
        self.episode, self.delay = 0, delay

    def reset(self, *, seed=None, options=None):
        del options
        super().reset(seed=seed)
        if seed is not None:
            self.episode = 0
        self.episode += 1
        self.task = int(self.np_random.integers(len(INSTRUCTIONS)))
        self.length = int(self.np_random.integers(1, 4))
        self.t = 0
        return self._observe(), self._info()

    def step(self, action):
        assert np.shape(action) == self.action_space.shape
        time.sleep(self.delay)
        self.t += 1
        ends = self.t == self.length
        success = ends and self.task == 0
        return self._observe(), float(success), success, ends and not success, self._info()

    def _observe(self):
        shape = self.observation_space["agentview"].shape
        draw = self.np_random.integers
        return {
            "agentview": draw(256, size=shape, dtype=np.uint8),
            "wrist": draw(256, size=shape, dtype=np.uint8),
            "proprio": np.full(8, 10 * self.episode + self.t, np.float32),
            "task_id": np.int64(self.task),
        }

    def _info(self):
        return {"instruction": INSTRUCTIONS[self.task], "t": self.t}


class StagedEnv(PictureEnv):
    """Asks for something else at every step, so that each frame has an instruction of its own."""

    def _info(self):
        info = super()._info()
        return info | {"instruction": f"{self.t} x {info['instruction']}" + self.t * "!"}


class QuietEnv(PictureEnv):
    """Tells its instruction at the beginning of an episode only."""

    def step(self, action):
        *result, info = super().step(action)
        del info["instruction"]
        return *result, info
