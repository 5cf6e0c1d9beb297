"""Replay for chunked transitions with dict observations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from vla_gym.errors import ConfigError


class ChunkReplaySamples(NamedTuple):
    """A batch of B transitions; SB3's names, so that stock TD3 can read it too.

    Attributes:
        observations: Key -> (B, ...) float32 (Discrete keys: (B, 1) int64).
        actions: (B, C * 7) executed chunks.
        next_observations: Like ``observations``; at an episode's end its real last observation.
        dones: (B, 1) 1.0 where the episode terminated; 0.0 at a time limit.
        rewards: (B, 1) discounted sum of rewards inside the chunk.
        discounts: (B, 1) ``gamma ** executed_steps``.
        mc_returns: (B, 1) discounted return to the episode's end, NaN while it is unknown.
    """

    observations: dict[str, Tensor]
    actions: Tensor
    next_observations: dict[str, Tensor]
    dones: Tensor
    rewards: Tensor
    discounts: Tensor
    mc_returns: Tensor


class ChunkReplayBuffer(ReplayBuffer):
    """Flat preallocated ring of transitions from all environments.

    SB3's buffers are indexed [position, env], which makes dropping one row impossible; this one is
    indexed by transition. Each transition brings its own discount: ``info["discount"]`` if the
    environment gives it, else ``gamma ** info["executed_steps"]``, else ``gamma``.

    When an episode ends, its transitions get their Monte-Carlo return
    ``G_t = r_t + discount_t * G_(t+1)``. After a time limit the missing tail counts as 0, which is
    a lower bound of the infinite-horizon return that the TD target bootstraps to.

    Never stored: transitions of an episode that a dead worker cut off
    (``info["worker_restarted"]``), and rows with a value that is not finite.
    """

    observations: dict[str, np.ndarray]  # type: ignore[assignment]
    next_observations: dict[str, np.ndarray]  # type: ignore[assignment]
    obs_shape: dict[str, tuple[int, ...]]  # type: ignore[assignment]

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        gamma: float = 0.99,
        seed: int | None = None,
    ) -> None:
        """Allocate the ring.

        Args:
            buffer_size: Capacity in transitions, over all environments.
            observation_space: A Dict space.
            action_space: A Box space; chunks are stored flattened.
            device: Torch device of the samples.
            n_envs: Number of environments that feed the ring.
            optimize_memory_usage: SB3's option; must be False (next observations are stored).
            gamma: Discount per control step, used where the environment gives none.
            seed: Seed of the sampling; the buffer has a generator of its own.

        Raises:
            ConfigError: If the observation space is not a Dict, or an option is not supported.
        """
        if not isinstance(observation_space, spaces.Dict):
            raise ConfigError(
                f"ChunkReplayBuffer expects a Dict observation, got {observation_space}."
            )
        if optimize_memory_usage:
            raise ConfigError("optimize_memory_usage is not supported: set it to False.")
        if buffer_size < 1:
            raise ConfigError(f"buffer_size must be at least 1, got {buffer_size}.")
        # ReplayBuffer.__init__ would allocate [position, env] arrays: only its base is wanted.
        BaseBuffer.__init__(
            self, buffer_size, observation_space, action_space, device, n_envs=n_envs
        )
        self.optimize_memory_usage, self.handle_timeout_termination = False, True
        self.gamma = gamma
        self.rng = np.random.default_rng(seed)
        size = self.buffer_size

        def rows() -> dict[str, np.ndarray]:
            return {
                key: np.zeros((size, *shape), observation_space[key].dtype)
                for key, shape in self.obs_shape.items()
            }

        self.observations, self.next_observations = rows(), rows()
        self.actions = np.zeros((size, self.action_dim), np.float32)
        self.rewards = np.zeros(size, np.float32)
        self.dones = np.zeros(size, np.float32)
        self.discounts = np.zeros(size, np.float32)
        self.mc_returns = np.full(size, np.nan, np.float32)
        self.num_added = 0
        self.num_dropped = 0
        # Running numbers (not slots) of each environment's current episode.
        self._episodes: list[list[int]] = [[] for _ in range(n_envs)]

    def reset(self) -> None:
        """Forget all transitions."""
        super().reset()
        self.num_added = self.num_dropped = 0
        self.mc_returns[:] = np.nan
        self._episodes = [[] for _ in range(self.n_envs)]

    def add(  # type: ignore[override]
        self,
        obs: dict[str, np.ndarray],
        next_obs: dict[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Push one transition per environment.

        Args:
            obs: Key -> (n_envs, ...) observation before the chunk.
            next_obs: Key -> (n_envs, ...) observation after it (the terminal one if it ended).
            action: (n_envs, C, 7) or (n_envs, C * 7) executed chunks.
            reward: (n_envs,) rewards.
            done: (n_envs,) episode ended, for whatever reason.
            infos: One per environment: ``discount`` or ``executed_steps``, ``TimeLimit.truncated``,
                ``worker_restarted``.
        """
        action = np.asarray(action, np.float32).reshape(self.n_envs, self.action_dim)
        for env, info in enumerate(infos):
            if info.get("worker_restarted", False):
                self._episodes[env] = []
                self.num_dropped += 1
                continue
            before = {key: np.asarray(obs[key][env]) for key in self.obs_shape}
            after = {key: np.asarray(next_obs[key][env]) for key in self.obs_shape}
            values = (*before.values(), *after.values(), action[env], reward[env])
            if all(bool(np.isfinite(value).all()) for value in values):
                slot = self._push(before, after, action[env])
                truncated = bool(info.get("TimeLimit.truncated", False))
                self.rewards[slot] = reward[env]
                self.dones[slot] = float(done[env] and not truncated)
                self.discounts[slot] = self._discount(info)
                self._episodes[env].append(self.num_added - 1)
            else:
                # The chain of this episode's returns is broken here.
                self._episodes[env] = []
                self.num_dropped += 1
            if done[env]:
                self._finish_episode(env)

    def _push(
        self, before: dict[str, np.ndarray], after: dict[str, np.ndarray], action: np.ndarray
    ) -> int:
        slot = self.pos
        for key in self.obs_shape:
            self.observations[key][slot] = before[key]
            self.next_observations[key][slot] = after[key]
        self.actions[slot] = action
        self.mc_returns[slot] = np.nan
        self.num_added += 1
        self.pos = self.num_added % self.buffer_size
        self.full = self.num_added >= self.buffer_size
        return slot

    def _discount(self, info: dict[str, Any]) -> float:
        if "discount" in info:
            return float(info["discount"])
        return float(self.gamma ** int(info.get("executed_steps", 1)))

    def _finish_episode(self, env: int) -> None:
        """Write the Monte-Carlo returns of the episode that has just ended."""
        value = 0.0
        oldest = self.num_added - self.buffer_size
        for number in reversed(self._episodes[env]):
            if number < oldest:
                break  # overwritten by the ring
            slot = number % self.buffer_size
            value = float(self.rewards[slot]) + float(self.discounts[slot]) * value
            self.mc_returns[slot] = value
        self._episodes[env] = []

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> ChunkReplaySamples:
        """Return ``batch_size`` transitions drawn uniformly with replacement.

        Raises:
            ConfigError: If the buffer is empty, or VecNormalize is used (the policy normalises).
        """
        if env is not None:
            raise ConfigError("Do not wrap the env in VecNormalize: the policy normalises itself.")
        if self.size() == 0:
            raise ConfigError("The replay buffer is empty: collect transitions before sampling.")
        return self.rows(self.rng.integers(self.size(), size=batch_size))

    def rows(self, index: np.ndarray) -> ChunkReplaySamples:
        """Return the transitions in the given slots.

        Args:
            index: (B,) integer slots, each below ``size()``.
        """

        def column(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values[index]).to(self.device)

        return ChunkReplaySamples(
            {key: column(values) for key, values in self.observations.items()},
            column(self.actions),
            {key: column(values) for key, values in self.next_observations.items()},
            column(self.dones)[:, None],
            column(self.rewards)[:, None],
            column(self.discounts)[:, None],
            column(self.mc_returns)[:, None],
        )
