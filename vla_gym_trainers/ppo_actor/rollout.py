"""Collects rollouts for PPO on the RL-token actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from vla_gym_trainers.ppo_actor.algorithm import PPOActor, PPORollout

#: Called after every step with dones and infos, as SB3's callbacks see them.
OnStep = Callable[[np.ndarray, list[dict[str, Any]]], None]


class RolloutCollector:
    """Plays all environments for a fixed number of chunks at a time; episodes run on.

    Attributes:
        obs: Observations to act on next; None before the first reset.
    """

    def __init__(self, env: VecEnv, learner: PPOActor, gamma: float) -> None:
        """Prepare.

        Args:
            env: Environments that reset in the same step (:mod:`sb3_vec_env`).
            learner: The policy.
            gamma: Discount per control step, where the environment gives none.
        """
        self.env, self.learner, self.gamma = env, learner, gamma
        self.obs: Any = None

    def collect(self, steps: int, on_step: OnStep) -> PPORollout:
        """Play ``steps`` chunks in every environment.

        Args:
            steps: T.
            on_step: See :data:`OnStep`.
        """
        if self.obs is None:
            self.obs = self.env.reset()
        rows: list[dict[str, Any]] = []
        for _ in range(steps):
            chunk, correction, log_prob = self.learner.draw(self.obs)
            new_obs, rewards, dones, infos = self.env.step(chunk)
            after = _after(new_obs, dones, infos)
            rows.append(self._row(after, rewards, dones, infos, correction, log_prob))
            self.obs = new_obs
            on_step(dones, infos)
        joined = {key: _stack([row[key] for row in rows]) for key in rows[0]}
        return PPORollout(**joined)

    def _row(
        self,
        after: dict[str, np.ndarray],
        rewards: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
        correction: Tensor,
        log_prob: Tensor,
    ) -> dict[str, Any]:
        learner, device = self.learner, log_prob.device
        observation, following = learner.tensors(self.obs), learner.tensors(after)
        limit = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        lost = np.array([bool(info.get("worker_restarted", False)) for info in infos])
        valid = torch.as_tensor(~lost & np.isfinite(rewards), device=device)
        for tensors in (observation, following):
            for key, value in tensors.items():
                if value.is_floating_point():
                    finite = value.flatten(1).isfinite().all(dim=1)
                    valid = valid & finite
                    # Not valid, so not learned from; but NaN times 0 is NaN.
                    tensors[key] = value.nan_to_num(0.0, 0.0, 0.0)
        return {
            "observations": observation,
            "next_observations": following,
            "corrections": correction,
            "log_probs": log_prob,
            "rewards": torch.as_tensor(np.nan_to_num(rewards), dtype=torch.float32, device=device),
            "discounts": torch.tensor(
                [self._discount(info) for info in infos], dtype=torch.float32, device=device
            ),
            "terminated": torch.as_tensor(dones & ~limit, device=device),
            "truncated": torch.as_tensor(dones & limit, device=device),
            "valid": valid,
        }

    def _discount(self, info: dict[str, Any]) -> float:
        if "discount" in info:
            return float(info["discount"])
        return float(self.gamma ** int(info.get("executed_steps", 1)))


def _stack(rows: list[Any]) -> Any:
    """Stack T rows of N environments to [N, T, ...]."""
    if isinstance(rows[0], dict):
        return {key: torch.stack([row[key] for row in rows], dim=1) for key in rows[0]}
    return torch.stack(rows, dim=1)


def _after(new_obs: Any, dones: np.ndarray, infos: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the observations after the chunks, of the same episodes."""
    after = {key: np.array(value) for key, value in new_obs.items()}
    for i in np.flatnonzero(dones):
        terminal = infos[i].get("terminal_observation")
        if terminal is not None:
            for key, value in after.items():
                value[i] = terminal[key]
    return after
