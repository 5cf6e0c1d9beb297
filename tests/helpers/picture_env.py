"""LIBERO's spaces without a simulator, for tests of wrappers: every frame is unlike any other."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
from gymnasium import spaces

INSTRUCTIONS = ("open the drawer", "push the plate", "turn on the stove")


class PictureEnv(gym.Env):
    """Pictures that tell seed, episode and step apart; short episodes of random length."""

    def __init__(self, size: int = 4, chunk_len: int = 2) -> None:
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
        self.episode = 0

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


class Pictures(PictureEnv):
    """Pictures whose episodes can be sought and saved; the last chunk of one is cut short."""

    def __init__(self, size=4):
        super().__init__(size, chunk_len=2)
        self._known = None

    def seek(self, seed, episode, env_index=None):
        del env_index
        self._known = seed, episode

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._known = seed, 0
        if self._known is not None:
            known, self._known = self._known, (self._known[0], self._known[1] + 1)
            seed = 1000 * known[0] + known[1]
        obs, info = super().reset(seed=seed, options=options)
        self.length = 1 + int(self.np_random.integers(5))
        return obs, self._said(info, 0, False)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        cut = terminated and self.length % 2 == 1
        return obs, reward, terminated, truncated, self._said(info, 2 - cut, terminated)

    def _said(self, info, executed, success):
        return info | {"executed_steps": executed, "success": success, "is_success": success}

    def _observe(self):
        obs, proprio = super()._observe(), self.np_random.normal(size=8).astype(np.float32)
        proprio[:3] = np.sign(proprio[:3]) / 10  # few places, so that some are seen again
        self.last = obs | {"proprio": proprio}
        return self.last

    def get_state(self):
        return copy.deepcopy({k: v for k, v in vars(self).items() if not k.endswith("_space")})

    def set_state(self, state):
        vars(self).update(copy.deepcopy(state))
        return self.last
