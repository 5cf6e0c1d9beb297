"""The toy task in several variants that differ in the reference's mistake alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from toy_env import CHUNK_LEN, ToyReach

from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.evaluation.run_player import RunPlayer
from vla_gym_trainers.runs.sb3_vec_env import SB3VecEnv, sb3_vec_env

#: Task 0: the reference misses by a constant that a policy can learn. Task 1: it hardly misses.
BIASES = {0: (0.05, -0.04, 0.03), 1: (0.0, 0.0, 0.0)}


class ToyTasks(ToyReach):
    """Each episode plays task 0 or 1, drawn by the environment's generator, and by weights."""

    task = 0
    weights: dict[int, float] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        sizes = [self.weights.get(task, 1.0) for task in (0, 1)]
        drawn = int(self.np_random.random() * sum(sizes) >= sizes[0])
        self._play((options or {}).get("task_id", drawn))
        return self._observe(), self._info(False, 0)

    def _play(self, task: int) -> None:
        self.task, self.bias = task, np.array(BIASES[task])

    def set_task_weights(self, weights: dict[int, float]) -> None:
        self.weights = weights

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "task": self.task}

    def set_state(self, state: dict[str, Any]) -> dict[str, Any]:
        self._play(state["task"])
        return super().set_state(state)

    def _observe(self) -> dict[str, Any]:
        return {**super()._observe(), "task_id": np.int64(self.task)}


def make_task_player() -> RunPlayer:
    envs = LiberoVectorEnv(
        4, env_factory=lambda _: ToyTasks(), workers=0, autoreset_mode="DISABLED"
    )
    return RunPlayer(envs, CHUNK_LEN)


def make_tasks(num_envs: int = 4) -> SB3VecEnv:
    envs = LiberoVectorEnv(
        num_envs, env_factory=lambda _: ToyTasks(), workers=0, autoreset_mode="SAME_STEP"
    )
    return sb3_vec_env(envs)  # type: ignore[return-value]
