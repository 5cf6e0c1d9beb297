"""A chunked point-reach task with a biased reference policy: LiberoVLA's spaces, no simulator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.vector import LiberoVectorEnv

CHUNK_LEN = 4
TOKEN_DIM = 12


class ToyReach(gym.Env[dict[str, Any], np.ndarray]):
    """Move a point to a goal; the "VLA" aims beside it and misses often.

    State: position and goal in the unit cube. One control step moves by 0.05 * action[:3]. Success
    within 0.06 of the goal. The reference steers to ``goal + bias + error``, where ``bias`` is the
    same in all episodes and ``error`` is drawn per episode and not observed, so that it succeeds in
    about a third of them and a policy can learn to correct the bias but not the error.
    """

    known = {"task_id": 0, "init_state_id": -1}  # what a reset was asked for

    def __init__(self, gamma: float = 0.98, max_control_steps: int = 24) -> None:
        self.gamma, self.max_control_steps = gamma, max_control_steps
        self.mix = np.random.default_rng(0).normal(size=(9, TOKEN_DIM)).astype(np.float32)
        self.bias = np.array([0.05, -0.04, 0.03])
        chunk = (CHUNK_LEN, 7)
        self.observation_space = spaces.Dict(
            {
                "rl_token": spaces.Box(-np.inf, np.inf, (TOKEN_DIM,), np.float32),
                "vla_action": spaces.Box(-1.0, 1.0, chunk, np.float32),
                "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32),
                "task_id": spaces.Discrete(10),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, chunk, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        rng, options = self.np_random, options or {}
        if "init_state_id" in options:
            rng = np.random.default_rng(options["init_state_id"])
        self.known = {"task_id": 0, "init_state_id": -1, **options}
        self.position = rng.uniform(0.0, 0.4, 3)
        self.goal = rng.uniform(0.6, 1.0, 3)
        self.error = rng.normal(0.0, 0.02, 3)
        self.elapsed = 0
        return self._observe(), self._info(False, 0)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        executed, success = 0, False
        for row in np.clip(np.asarray(action, np.float64), -1.0, 1.0):
            if success or self.elapsed >= self.max_control_steps:
                break
            self.position = self.position + 0.05 * row[:3]
            executed, self.elapsed = executed + 1, self.elapsed + 1
            success = bool(np.linalg.norm(self.position - self.goal) < 0.06)
        truncated = not success and self.elapsed >= self.max_control_steps
        reward = self.gamma ** (executed - 1) if success else 0.0
        return self._observe(), reward, success, truncated, self._info(success, executed)

    def get_state(self) -> dict[str, Any]:
        """Return everything that the future depends on."""
        mine = {key: np.copy(getattr(self, key)) for key in ("position", "goal", "error")}
        return {**mine, "elapsed": self.elapsed, "rng": copy.deepcopy(self.np_random)}

    def set_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Go on from a state; return the observation."""
        for key in ("position", "goal", "error"):
            setattr(self, key, np.copy(state[key]))
        self.elapsed, self.np_random = state["elapsed"], copy.deepcopy(state["rng"])
        return self._observe()

    def _observe(self) -> dict[str, Any]:
        offset = self.goal - self.position
        features = np.concatenate([self.position, self.goal, offset]).astype(np.float32)
        target, position = self.goal + self.bias + self.error, self.position.copy()
        chunk = np.zeros((CHUNK_LEN, 7), np.float32)
        for row in chunk:
            row[:3] = np.clip((target - position) / 0.1, -1.0, 1.0)
            position = position + 0.05 * row[:3]
        chunk[:, 6] = 1.0
        proprio = np.concatenate([self.position, np.zeros(5)]).astype(np.float32)
        return {
            "rl_token": np.tanh(features @ self.mix),
            "vla_action": chunk,
            "proprio": proprio,
            "task_id": np.int64(0),
        }

    def _info(self, success: bool, executed: int) -> dict[str, Any]:
        return {
            "is_success": success,
            "success": success,
            "executed_steps": executed,
            "elapsed_steps": self.elapsed,
            "discount": self.gamma**executed,
            **self.known,
        }


class InPieces(ToyReach):
    """ToyReach that executes two control steps at a time; ends inside a chunk and a piece."""

    def __init__(self, gamma: float = 0.98, rows: int = 2) -> None:
        super().__init__(gamma, max_control_steps=22)
        self.action_space = spaces.Box(-1.0, 1.0, (rows, 7), np.float32)


def in_process(
    factory: Callable[[int], Any], num_envs: int = 2, autoreset_mode: str = "SAME_STEP"
) -> LiberoVectorEnv:
    """Environments of this process."""
    return LiberoVectorEnv(num_envs, env_factory=factory, workers=0, autoreset_mode=autoreset_mode)
