"""Replay of chunked transitions: flat, sampled by task, with a stride too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from vla_gym.errors import ConfigError
from vla_gym_trainers.rollout.chunks import Observation
from vla_gym_trainers.td3.ring import DEMONSTRATED, ChunkReplaySamples, Ring, TaskIndex
from vla_gym_trainers.td3.row_store import RowStore
from vla_gym_trainers.td3.windows import Pieces

_SIDES = ("obs", "next")  # before and after the chunk
#: Columns beside the observations; the return is the last one, as it may be unknown.
_COLUMNS = ("actions", "rewards", "dones", "discounts", "truncated", "mc_returns")
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

    With ``balanced`` each batch holds transitions of every ``task_id`` in proportion to
    ``task_weights``, without any as many as of any other, however many there are of each.
    Pickling keeps the filled rows only; a buffer that comes back goes on as the original would, its
    sampling included.

    Where observations hold ``vla_input``, what the VLA saw, it is kept apart, each once, and the
    key's column has its number there; :meth:`vla_inputs` returns it.

    Attributes:
        observations: Key -> (buffer_size, ...) view.
        next_observations: The same.
        actions: (buffer_size, C * 7) view.
        task_weights: By task, above 0, 1 where it has none; see ``balanced``.
        prior: Other transitions, of which half of each sampled batch comes; with ``balanced`` half
            as many rows as its tasks' share of the batch, beside their share of the other rows.
            None: there are none.
        inputs: What the VLA saw; empty unless it is observed.
    """

    observations: dict[str, np.ndarray]  # type: ignore[assignment]
    next_observations: dict[str, np.ndarray]  # type: ignore[assignment]
    obs_shape: dict[str, tuple[int, ...]]  # type: ignore[assignment]
    prior: ChunkReplayBuffer | None = None

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
            observation_space: A Dict space; tasks are its Discrete ``task_id``.
            action_space: A Box space; chunks are stored flattened.
            device: Torch device of the samples.
            n_envs: Number of environments that feed the ring.
            optimize_memory_usage: SB3's option; must be False (next observations are stored).
            gamma: Discount per control step, used where the environment gives none.
            seed: Seed of the sampling; the buffer has a generator of its own.
            balanced: Sample by task, in proportion to ``task_weights``, if tasks are observed.

        Raises:
            ConfigError: If the observation space is no Dict, or the option is set.
        """
        if not isinstance(observation_space, spaces.Dict) or optimize_memory_usage:
            raise ConfigError(
                "Expected a Dict observation and optimize_memory_usage=False, got "
                f"{observation_space} and {optimize_memory_usage}."
            )
        # ReplayBuffer.__init__ would allocate [position, env] arrays: only its base is wanted.
        size = max(buffer_size, n_envs)
        BaseBuffer.__init__(self, size, observation_space, action_space, device, n_envs=n_envs)
        self.optimize_memory_usage, self.handle_timeout_termination = False, True
        discrete = [k for k, s in observation_space.items() if isinstance(s, spaces.Discrete)]
        self.gamma, self.balanced = gamma, balanced and "task_id" in discrete
        self.task_weights: Mapping[int, float] = {}
        self.rng = np.random.default_rng(seed)
        self._integers = [f"{side}/{key}" for side in _SIDES for key in discrete]
        self.reset()

    def reset(self) -> None:
        """Forget all transitions."""
        shapes = {f"{s}/{key}": shape for s in _SIDES for key, shape in self.obs_shape.items()}
        self._inputs = [name for name in shapes if name.endswith("/vla_input")]
        shapes |= dict.fromkeys((*self._inputs, *_COLUMNS), ())
        shapes["actions"] = (self.action_dim,)
        self.inputs = RowStore()
        self._ring, self._tasks = Ring(self.buffer_size, shapes), TaskIndex()
        self.cut_episodes()
        self._bind()

    def _bind(self) -> None:
        views = self._ring.views
        self.observations = {key: views[f"obs/{key}"] for key in self.obs_shape}
        self.next_observations = {key: views[f"next/{key}"] for key in self.obs_shape}
        self.actions = views["actions"]
        self.rewards, self.dones, self.discounts, self.mc_returns = (views[n] for n in _SCALARS)

    @property
    def num_added(self) -> int:
        """Transitions stored in all, those that are overwritten included."""
        return self._ring.num_added

    @property
    def task_counts(self) -> dict[int, int]:
        """Stored transitions by task, which the observation must have."""
        return {task: len(slots) for task, slots in self._tasks.slots(self._ring).items()}

    def size(self) -> int:
        """Return the number of transitions that are stored now."""
        return len(self._ring)

    def cut_episodes(self) -> None:
        """Begin new episodes; the returns of those under way stay unknown."""
        # Of each environment's current episode: running numbers (not slots) of its chunks; its
        # pieces; running numbers and first pieces of what begins inside its chunks.
        self._episodes: list[list[int]] = [[] for _ in range(self.n_envs)]
        self._pieces = [Pieces() for _ in range(self.n_envs)]
        self._begun: list[list[tuple[int, int]]] = [[] for _ in range(self.n_envs)]

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
        restarted = np.array([bool(info.get("worker_restarted", False)) for info in infos])
        terminated = np.logical_and(done, ~limit)
        discounts = [
            info.get("discount", self.gamma ** int(info.get("executed_steps", 1))) for info in infos
        ]
        truncated = np.logical_and(done, limit)
        rows = self._pack(obs, next_obs, action, reward, terminated, discounts, truncated)
        kept = np.isfinite(rows[:, :-1]).all(axis=1) & ~restarted
        number = self.num_added
        self._push(rows[kept])
        self._release(rows[~kept])
        for env, info in enumerate(infos):
            if kept[env]:
                self._episodes[env].append(number)
                number += 1
                if "pieces" in info:
                    mine = {key: np.asarray(value[env]) for key, value in obs.items()}
                    self._add_pieces(env, mine, action[env], info, bool(done[env]))
                if done[env]:
                    self._write_returns(env)
            if done[env] or not kept[env]:  # the chain of returns ends here
                self._episodes[env], self._pieces[env], self._begun[env] = [], Pieces(), []

    def _pack(self, obs: Any, next_obs: Any, *numbers: Any) -> np.ndarray:
        """Return rows of the ring, with numbers as in ``_COLUMNS``; returns are not known yet."""
        count = np.size(numbers[1])
        columns = dict(zip(_COLUMNS, (*numbers, np.full(count, np.nan)), strict=True))
        for side, observed in zip(_SIDES, (obs, next_obs), strict=True):
            columns |= {f"{side}/{key}": observed[key] for key in self.obs_shape}
        for name in self._inputs:
            columns[name] = self.inputs.add(np.reshape(columns[name], (count, -1)))
        return self._ring.pack(columns, count)

    def _push(self, rows: np.ndarray) -> None:
        self._release(self._ring.overwritten(len(rows)))
        self._ring.push(rows)

    def _release(self, rows: np.ndarray) -> None:
        """Let go what the VLA saw, of rows that are not stored any more."""
        for name in self._inputs:
            self.inputs.release(self._ring.column(rows, name).astype(np.int64))

    def _add_pieces(
        self, env: int, obs: Observation, action: np.ndarray, info: Mapping[str, Any], done: bool
    ) -> None:
        """Push what begins inside one environment's chunk, whose own row is stored."""
        if not all(np.isfinite(v).all() for piece in info["pieces"] for v in piece.obs.values()):
            self._pieces[env], self._begun[env] = Pieces(), []
            return
        terminated = done and not info.get("TimeLimit.truncated", False)
        chunk = np.reshape(action, (-1, (self.action_space.shape or (0,))[-1]))
        inside = info["pieces"], int(info["stride"]), done, terminated
        for window in self._pieces[env].add(obs, chunk, *inside):
            self._begun[env].append((self.num_added, window.start))
            self._push(self._pack(*window[1:]))

    def _write_returns(self, env: int) -> None:
        """Write the Monte-Carlo returns of an episode that has just ended."""
        value, oldest = 0.0, self.num_added - self.buffer_size  # those before are overwritten
        for number in reversed([n for n in self._episodes[env] if n >= oldest]):
            slot = number % self.buffer_size
            value = float(self.rewards[slot]) + float(self.discounts[slot]) * value
            self.mc_returns[slot] = value
        returns = self._pieces[env].returns()
        for number, start in self._begun[env]:
            if number >= oldest:
                self.mc_returns[number % self.buffer_size] = returns[start]

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> ChunkReplaySamples:
        """Return ``batch_size`` transitions drawn with replacement.

        Raises:
            ConfigError: If the buffer is empty, or VecNormalize is used (the policy normalises).
        """
        if env is not None:
            raise ConfigError("Do not wrap the env in VecNormalize: the policy normalises itself.")
        if self.prior is None:
            return self.rows(self.draw(batch_size))
        count = batch_size // 2
        if self.balanced:
            shown = self.prior.task_counts.keys()
            tasks = self.task_counts.keys() | shown
            weights = {task: self.task_weights.get(task, 1.0) for task in tasks}
            count = round(count * sum(weights[task] for task in shown) / sum(weights.values()))
        self.prior.device, self.prior.task_weights = self.device, self.task_weights
        return self.rows(self.draw(batch_size - count)).joined(self.prior.sample(count))

    def draw(self, batch_size: int) -> np.ndarray:
        """Return ``batch_size`` slots drawn with replacement, for :meth:`rows`.

        Raises:
            ConfigError: If the buffer is empty.
        """
        if self.size() == 0:
            raise ConfigError("The replay buffer is empty: collect transitions before sampling.")
        if self.balanced and len(self._tasks.slots(self._ring)) > 1:
            return self._tasks.sample(self._ring, batch_size, self.rng, self.task_weights)
        return self.rng.integers(self.size(), size=batch_size)

    def vla_inputs(self, index: np.ndarray) -> np.ndarray:
        """Return what the VLA saw before the chunk, (B, L) uint8, in slots (B,)."""
        return self.inputs[self.observations["vla_input"][index].astype(np.int64)]

    def rows(self, index: np.ndarray) -> ChunkReplaySamples:
        """Return the transitions in the given slots.

        Args:
            index: (B,) integer slots, each below ``size()``.
        """
        batch = self._ring.gather(index, self.device)
        for name in self._integers:
            batch[name] = batch[name].long()
        obs, next_obs = ({key: batch[f"{s}/{key}"] for key in self.obs_shape} for s in _SIDES)
        scalars = {name: batch[name] for name in _SCALARS}
        actions, shown = batch["actions"], obs.get(DEMONSTRATED)
        shown = torch.full_like(actions, torch.nan) if shown is None else shown.flatten(1)
        return ChunkReplaySamples(obs, actions, next_obs, **scalars, demonstrated=shown)

    def __getstate__(self) -> dict[str, Any]:
        views = ("observations", "next_observations", "actions", *_SCALARS)
        return {key: value for key, value in vars(self).items() if key not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()
