"""A toy for on-policy learning: move to the side that the instruction names.

The state is a position x. Each control step adds 0.1 times the first number of the action; success
is x >= 0.5 for task 0 and x <= -0.5 for task 1; the limit is 20 control steps. Both cameras show
x as brightness, so that a policy may see it; proprio holds it.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.envs.schedule import TaskSchedule

TEXTS = ("go to the right", "go to the left")
LIMIT, GOAL, GAMMA = 20, 0.5, 0.9


class ToyTokenEnv(gym.Env[dict[str, Any], np.ndarray]):
    """See the module; begins episodes as LiberoEnv does: by seed, episode number and group."""

    metadata: dict[str, Any] = {"render_modes": [], "render_fps": 20}

    def __init__(
        self,
        index: int = 0,
        *,
        chunk_len: int = 4,
        group_size: int = 1,
        tasks: tuple[int, ...] = (0, 1),
        size: int = 64,
        die_in: tuple[int, str] | None = None,
        goal: float = GOAL,
    ) -> None:
        self.schedule = TaskSchedule(tasks, "uniform", index, group_size)
        self.size, self.die_in, self.goal = size, die_in, goal
        frame = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "agentview": frame,
                "wrist": frame,
                "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32),
                "task_id": spaces.Discrete(2),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (chunk_len, 7), np.float32)
        self._seed_value, self._next = 0, 0

    def seek(self, seed: int, episode: int, env_index: int | None = None) -> None:
        del env_index
        self._seed_value, self._next = seed, episode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._seed_value, self._next = int(seed), 0
        self.task, _, rng = self.schedule.task_and_rng(self._seed_value, self._next)
        self.task = (options or {}).get("task_id", self.task)
        self.episode = self._next
        self._next += 1
        self.x, self.elapsed = float(rng.uniform(-0.2, 0.2)), 0
        return self._observe(), self._info(False, 0)

    def _die_if_due(self):
        if self.die_in is not None and self.episode == self.die_in[0] and self.elapsed:
            if not os.path.exists(self.die_in[1]):
                open(self.die_in[1], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    def step(self, action):
        self._die_if_due()
        executed, success = 0, False
        while executed < len(action) and self.elapsed < LIMIT and not success:
            self.x += 0.1 * float(action[executed, 0])
            executed, self.elapsed = executed + 1, self.elapsed + 1
            success = self.x >= self.goal if self.task == 0 else self.x <= -self.goal
        truncated = not success and self.elapsed >= LIMIT
        reward = GAMMA ** (executed - 1) if success else 0.0
        return self._observe(), reward, success, truncated, self._info(success, executed)

    def _observe(self):
        level = np.uint8(np.clip(128 + 100 * self.x, 0, 255))
        frame = np.full((self.size, self.size, 3), level, np.uint8)
        proprio = np.zeros(8, np.float32)
        proprio[0] = self.x
        return {
            "agentview": frame,
            "wrist": frame.copy(),
            "proprio": proprio,
            "task_id": np.int64(self.task),
        }

    def _info(self, success, executed):
        return {
            "success": success,
            "is_success": success,
            "executed_steps": executed,
            "elapsed_steps": self.elapsed,
            "instruction": TEXTS[self.task],
            "task_id": self.task,
            "init_state_id": -1,
            "discount": GAMMA**executed,
        }
