"""Replay of chunked transitions: flat, sampled evenly over tasks, with a stride too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from vla_gym.errors import ConfigError
from vla_gym_trainers.td3.ring import ChunkReplaySamples, Ring, TaskIndex
from vla_gym_trainers.td3.windows import Pieces, Window

_SCALARS = ("rewards", "dones", "discounts", "mc_returns")


class ChunkReplayBuffer(ReplayBuffer):
    """Flat preallocated ring of transitions from all environments.

    SB3's buffers are indexed [position, env], which makes dropping one row impossible; this one is
    indexed by transition.

    Each transition brings its own discount: ``info["discount"]`` if the environment gives it, else
    ``gamma ** info["executed_steps"]``, else ``gamma``. Where an info has ``pieces`` and ``stride``
    (see :mod:`vla_gym_trainers.rollout.chunks`), each piece after a chunk's first begins a
    transition of its own.

    When an episode ends, its transitions get their Monte-Carlo return
    ``G_t = r_t + discount_t * G_(t+1)``. After a time limit the missing tail counts as 0, which is
    a lower bound of the infinite-horizon return that the TD target bootstraps to.

    Never stored: transitions of an episode that a dead worker cut off
    (``info["worker_restarted"]``), and rows with a value that is not finite.

    With ``balanced`` each batch holds as many transitions of every ``task_id`` as of any other,
    however many there are of each. Pickling keeps the filled rows only; a buffer that comes back
    goes on as the original would, its sampling included.

    Attributes:
        observations: Key -> (buffer_size, ...) view.
        next_observations: The same.
        actions: (buffer_size, C * 7) view.
        num_dropped: Transitions that were not stored.
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
        balanced: bool = False,
    ) -> None:
        """Allocate the ring.

        Args:
            buffer_size: Capacity in transitions, over all environments (at least one for each).
            observation_space: A Dict space.
            action_space: A Box space; chunks are stored flattened.
            device: Torch device of the samples.
            n_envs: Number of environments that feed the ring.
            optimize_memory_usage: SB3's option; must be False (next observations are stored).
            gamma: Discount per control step, used where the environment gives none.
            seed: Seed of the sampling; the buffer has a generator of its own.
            balanced: Sample all tasks alike; needs ``task_id`` in the observation.

        Raises:
            ConfigError: If the observation space does not fit, or an option is not supported.
        """
        if not isinstance(observation_space, spaces.Dict):
            raise ConfigError(f"Expected a Dict observation, got {observation_space}.")
        if optimize_memory_usage:
            raise ConfigError("optimize_memory_usage is not supported: set it to False.")
        if buffer_size < 1:
            raise ConfigError(f"buffer_size must be at least 1, got {buffer_size}.")
        if balanced and not isinstance(observation_space.get("task_id"), spaces.Discrete):
            raise ConfigError(
                "balanced sampling needs a Discrete 'task_id' in the observation, got "
                f"{sorted(observation_space.keys())}."
            )
        # ReplayBuffer.__init__ would allocate [position, env] arrays: only its base is wanted.
        size = max(buffer_size, n_envs)
        BaseBuffer.__init__(self, size, observation_space, action_space, device, n_envs=n_envs)
        self.optimize_memory_usage, self.handle_timeout_termination = False, True
        self.gamma, self.balanced = gamma, balanced
        self.rng = np.random.default_rng(seed)
        discrete = [k for k, s in observation_space.items() if isinstance(s, spaces.Discrete)]
        self._integers = [f"{prefix}/{key}" for prefix in ("obs", "next") for key in discrete]
        self._clear()

    def _clear(self) -> None:
        shapes = {
            f"{prefix}/{key}": shape
            for prefix in ("obs", "next")
            for key, shape in self.obs_shape.items()
        }
        shapes["actions"] = (self.action_dim,)
        shapes |= {name: () for name in _SCALARS}
        self._ring = Ring(self.buffer_size, shapes, self.n_envs)
        self._tasks = TaskIndex(self.buffer_size if self.balanced else 0)
        self.num_dropped = 0
        # Of each environment's current episode: running numbers (not slots) of its chunks; its
        # pieces; running numbers and first pieces of what begins inside its chunks.
        self._episodes: list[list[int]] = [[] for _ in range(self.n_envs)]
        self._pieces = [Pieces() for _ in range(self.n_envs)]
        self._begun: list[list[tuple[int, int]]] = [[] for _ in range(self.n_envs)]
        self._bind()
        self.mc_returns[:] = np.nan

    def _bind(self) -> None:
        self._stage, views = self._ring.stage, self._ring.views
        self.observations = {key: views[f"obs/{key}"] for key in self.obs_shape}
        self.next_observations = {key: views[f"next/{key}"] for key in self.obs_shape}
        self.actions, self.rewards, self.dones = (views[k] for k in ("actions", *_SCALARS[:2]))
        self.discounts, self.mc_returns = views["discounts"], views["mc_returns"]

    @property
    def num_added(self) -> int:
        """Transitions stored in all, those that are overwritten included."""
        return self._ring.num_added

    @property
    def task_counts(self) -> dict[int, int]:
        """Stored transitions by task; empty without ``balanced``."""
        return self._tasks.counts

    def size(self) -> int:
        """Return the number of transitions that are stored now."""
        return len(self._ring)

    def reset(self) -> None:
        """Forget all transitions."""
        super().reset()
        self._clear()

    def add(  # type: ignore[override]
        self,
        obs: Mapping[str, np.ndarray],
        next_obs: Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: Sequence[Mapping[str, Any]],
    ) -> None:
        """Push one transition per environment, and what begins inside.

        Args:
            obs: Key -> (n_envs, ...) observation before the chunk.
            next_obs: Key -> (n_envs, ...) observation after it (the terminal one if it ended).
            action: (n_envs, C, 7) or (n_envs, C * 7) executed chunks.
            reward: (n_envs,) rewards.
            done: (n_envs,) episode ended, for whatever reason.
            infos: One per environment: ``discount`` or ``executed_steps``, ``TimeLimit.truncated``,
                ``worker_restarted``, ``pieces``.
        """
        limit = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        self._put(slice(None), obs, next_obs, action)
        self._stage["rewards"][:] = reward
        self._stage["discounts"][:] = [self._discount(info) for info in infos]
        self._stage["dones"][:] = np.logical_and(done, ~limit)
        finite = np.isfinite(self._ring.staged[:, : self._ring.places["mc_returns"].start]).all(
            axis=1
        )
        restarted = np.array([bool(info.get("worker_restarted", False)) for info in infos])
        kept = np.flatnonzero(finite & ~restarted)
        number = self.num_added
        self._push(kept)
        self.num_dropped += self.n_envs - len(kept)
        for env in np.flatnonzero(~finite | restarted).tolist():
            self._episodes[env] = []  # the chain of this episode's returns is broken here
        for env in kept.tolist():
            self._episodes[env].append(number)
            number += 1
        for env in np.flatnonzero(done).tolist():
            self._finish_episode(env)
        for env, info in enumerate(infos):
            if "pieces" in info:
                mine = {key: np.asarray(value[env]) for key, value in obs.items()}
                terminated = bool(done[env] and not limit[env])
                self._add_pieces(env, mine, action[env], info, bool(done[env]), terminated)

    def _put(self, rows: Any, obs: Any, next_obs: Any, action: np.ndarray) -> None:
        """Stage observations and actions; the returns are not known yet."""
        stage = self._stage
        for prefix, values in (("obs", obs), ("next", next_obs)):
            for key in self.obs_shape:
                part = stage[f"{prefix}/{key}"]
                part[rows] = np.reshape(values[key], part[rows].shape)
        stage["actions"][rows] = np.reshape(action, stage["actions"][rows].shape)
        stage["mc_returns"][rows] = np.nan

    def _push(self, rows: np.ndarray) -> None:
        """Copy staged rows into the ring, over the oldest ones if it is full."""
        slots = self._ring.push(rows)
        if self.balanced:
            tasks = self._stage["obs/task_id"].reshape(self.n_envs)[rows]
            for slot, task in zip(slots.tolist(), tasks.tolist(), strict=True):
                self._tasks.put(slot, int(task))
        self.pos = self.num_added % self.buffer_size
        self.full = self.num_added >= self.buffer_size

    def _discount(self, info: Mapping[str, Any]) -> float:
        return float(info.get("discount", self.gamma ** int(info.get("executed_steps", 1))))

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

    def _add_pieces(
        self,
        env: int,
        obs: Mapping[str, np.ndarray],
        action: np.ndarray,
        info: Mapping[str, Any],
        done: bool,
        terminated: bool,
    ) -> None:
        """Push what begins inside one environment's chunk."""
        pieces = info["pieces"]
        seen = [*obs.values(), *(v for piece in pieces for v in piece.obs.values()), action]
        if info.get("worker_restarted", False) or not all(np.isfinite(v).all() for v in seen):
            self._pieces[env], self._begun[env] = Pieces(), []
            return
        chunk = np.reshape(action, (-1, (self.action_space.shape or (0,))[-1]))
        running = self._pieces[env]
        for window in running.add(obs, chunk, pieces, int(info["stride"]), done, terminated):
            self._begun[env].append((self.num_added, window.start))
            self._push_window(window)
        if done:
            returns, oldest = running.returns(), self.num_added - self.buffer_size
            for number, start in self._begun[env]:
                if number >= oldest:
                    self.mc_returns[number % self.buffer_size] = returns[start]
            self._pieces[env], self._begun[env] = Pieces(), []

    def _push_window(self, window: Window) -> None:
        self._put(0, window.obs, window.next_obs, window.action)
        self._stage["rewards"][0] = window.reward
        self._stage["discounts"][0], self._stage["dones"][0] = window.discount, window.terminated
        self._push(np.array([0]))

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> ChunkReplaySamples:
        """Return ``batch_size`` transitions drawn with replacement.

        Raises:
            ConfigError: If the buffer is empty, or VecNormalize is used (the policy normalises).
        """
        if env is not None:
            raise ConfigError("Do not wrap the env in VecNormalize: the policy normalises itself.")
        if self.size() == 0:
            raise ConfigError("The replay buffer is empty: collect transitions before sampling.")
        if self.balanced and len(self.task_counts) > 1:
            return self.rows(self._tasks.sample(batch_size, self.rng))
        return self.rows(self.rng.integers(self.size(), size=batch_size))

    def rows(self, index: np.ndarray) -> ChunkReplaySamples:
        """Return the transitions in the given slots.

        Args:
            index: (B,) integer slots, each below ``size()``.
        """
        batch = self._ring.gather(index, self.device)
        for name in self._integers:
            batch[name] = batch[name].long()
        obs, next_obs = (
            {key: batch[f"{prefix}/{key}"] for key in self.obs_shape} for prefix in ("obs", "next")
        )
        scalars = {name: batch[name] for name in _SCALARS}
        return ChunkReplaySamples(obs, batch["actions"], next_obs, **scalars)

    def __getstate__(self) -> dict[str, Any]:
        views = ("observations", "next_observations", "actions", *_SCALARS, "_stage")
        return {key: value for key, value in vars(self).items() if key not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()
        self.mc_returns[self.size() :] = np.nan
