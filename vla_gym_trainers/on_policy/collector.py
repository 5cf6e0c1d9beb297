"""Plays a vector environment with a policy and writes a rollout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.on_policy.policy import Act, Observation
from vla_gym_trainers.on_policy.rollout import Rollout, RolloutShape


class Actor(Protocol):
    """Who acts: a :class:`Policy`, or a mixture with a teacher."""

    @property
    def needs_values(self) -> bool:
        """Whether values are wanted of observations that no chunk begins at."""

    def observe(self, observation: Mapping[str, np.ndarray], texts: Sequence[str]) -> Observation:
        """Return the observations as they are stored and as ``act`` takes them."""

    def act(
        self,
        observation: Observation,
        instructions: Sequence[str],
        keys: np.ndarray | None = None,
    ) -> Act:
        """Choose chunks; row i's draws are a function of ``keys[i]``."""

    def values(self, observation: Observation, instructions: Sequence[str]) -> Tensor:
        """Return the values (B,) of observations."""


class Collector:
    """Fills rollouts; see :meth:`collect`.

    Whole episodes (``shape.episodes``): each collection starts anew with its seed, and an
    environment that has played its episodes waits for the others. What is played is a function of
    the seed and the parameters. Rows of a fixed length go on where the last collection stopped.

    A transition that died with its worker, or in which a number was not finite, is written as not
    valid. A row of a whole episode that was lost has no end then, and the next one is played as if
    nothing had happened.
    """

    def __init__(
        self, envs: LiberoVectorEnv, shape: RolloutShape, *, overlap: bool = False
    ) -> None:
        """Take over a vector environment.

        Args:
            envs: Chunked, both cameras, with ``gamma``, autoreset mode NEXT_STEP.
            shape: What rollouts will have.
            overlap: Let the VLA work for one half of the environments while the other half
                simulates. Which rows come together then depends on timing, and with it the last
                bits of log-probabilities; draws do not.

        Raises:
            ConfigError: If they do not fit each other.
        """
        if envs.metadata["autoreset_mode"] != AutoresetMode.NEXT_STEP:
            raise ConfigError("Collecting needs a vector env with autoreset_mode='NEXT_STEP'.")
        steps = (envs.single_action_space.shape or (0,))[0]
        if envs.num_envs != shape.num_envs or len(envs.single_action_space.shape or ()) != 2:
            raise ConfigError(
                f"Expected {shape.num_envs} chunked environments, got {envs.num_envs} with actions "
                f"of shape {envs.single_action_space.shape}: give them a chunk_len."
            )
        self.envs, self.shape, self.overlap = envs, shape, overlap
        self.chunk_len = steps
        n = envs.num_envs
        self._seeds = np.zeros(n, np.int64)  # of each environment, for the keys of the draws
        self._episode, self._chunk = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._played, self._slot = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._resetting, self._busy = np.zeros(n, bool), np.zeros(n, bool)
        self._finite = np.ones(n, bool)  # whether all numbers of the last observation are
        self._texts = np.full(n, None, dtype=object)
        self._last: Observation | None = None  # last observation of every environment

    def collect(self, actor: Actor, out: Rollout, *, seed: int) -> Rollout:
        """Play until the rollout is full.

        Args:
            actor: Who acts; its parameters must not change meanwhile.
            out: Overwritten.
            seed: Of layouts and draws. With rows of a fixed length, the first one counts, and
                the first one after :meth:`restart`.

        Returns:
            ``out``.
        """
        began = time.perf_counter()
        out.clear()
        self._out, self._arrays, self._actor = out, out.arrays, actor
        self._time = {"forward": 0.0, "environment": 0.0}
        self._slot[:], self._played[:] = 0, 0
        if self._last is None or self.shape.episodes is not None:
            self._seeds = seed + self.shape.first_env + np.arange(self.envs.num_envs)
            self._start(self._seeds.tolist())
        assert self._last is not None
        due = self._resetting.copy()
        self._send_resets(np.flatnonzero(due))
        self._act(np.flatnonzero(~due), {k: v[~due] for k, v in self._last.items()})
        while self._busy.any():
            count = int(self._busy.sum())
            wanted = (count + 1) // 2 if self.overlap else count
            self._take(*self._clocked(lambda n=wanted: self.envs.recv(n)))
        out.seconds = {**self._time, "rollout": time.perf_counter() - began}
        return out

    def restart(self) -> None:
        """Let the next collection begin new episodes by its seed, whatever the rows."""
        self._last = None

    def _start(self, seeds: list[int]) -> None:
        obs, infos = self._clocked(lambda: self.envs.reset(seed=seeds))
        self._texts[:] = infos["instruction"]
        self._last = self._observe(obs, np.arange(self.envs.num_envs))
        self._episode[:], self._chunk[:], self._resetting[:] = 0, 0, False

    def _observe(self, obs: dict[str, np.ndarray], ids: np.ndarray) -> Observation:
        """Keep what is stored of observations, with 0 for numbers that are not finite."""
        texts = self._texts[ids].tolist()
        rows: Observation = self._forward(lambda: self._actor.observe(obs, texts))
        self._finite[ids] = True
        for key, value in rows.items():
            if np.issubdtype(value.dtype, np.floating):
                self._finite[ids] &= np.isfinite(value).reshape(len(ids), -1).all(axis=1)
                rows[key] = np.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
        return rows

    def _take(
        self,
        obs: dict[str, np.ndarray],
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: dict[str, Any],
    ) -> None:
        """Write what came of some environments' steps, and let them go on."""
        ids = infos["env_id"]
        self._busy[ids] = False
        stepped = ~self._resetting[ids]
        self._resetting[ids] = False
        self._texts[ids[~stepped]] = infos["instruction"][~stepped]
        was_finite = self._finite[ids]
        rows = self._observe(obs, ids)
        assert self._last is not None
        for key, value in rows.items():
            self._last[key][ids] = value
        lost = stepped & truncated & infos.get("worker_restarted", np.zeros(len(ids), bool))
        over = stepped & (terminated | truncated)
        kept = stepped & ~lost & was_finite & self._finite[ids] & np.isfinite(rewards)
        self._write_results(ids[kept], rewards, terminated, truncated, infos, np.flatnonzero(kept))
        self._slot[ids[stepped]] += 1
        self._chunk[ids[stepped]] += 1
        full = stepped & (self._slot[ids] >= self.shape.num_chunks)
        opened = kept & ~terminated & (truncated | full)
        self._bootstrap(ids[opened], {k: v[opened] for k, v in rows.items()})
        self._episode[ids[over]] += 1
        self._chunk[ids[over]] = 0
        if self.shape.episodes is None:
            finished = full
            self._resetting[ids[over & full]] = True  # at the start of the next collection
        else:
            self._played[ids[over]] += 1
            self._slot[ids[over]] = 0
            finished = over & (self._played[ids] >= self.shape.episodes)
            if (full & ~over).any():
                raise ConfigError(
                    f"An episode is longer than the {self.shape.num_chunks} chunks of a row."
                )
        self._send_resets(ids[over & ~finished])
        go_on = ~over & ~finished
        self._act(ids[go_on], {k: v[go_on] for k, v in rows.items()})

    def _row_of(self, ids: np.ndarray) -> np.ndarray:
        return ids * (self.shape.episodes or 1) + self._played[ids]

    def _write_results(
        self,
        ids: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: dict[str, Any],
        at: np.ndarray,
    ) -> None:
        where = self._row_of(ids), self._slot[ids]
        self._arrays["rewards"][where] = rewards[at]
        self._arrays["discounts"][where] = np.asarray(infos["discount"])[at]
        self._arrays["executed"][where] = np.asarray(infos["executed_steps"])[at]
        self._arrays["terminated"][where] = terminated[at]
        self._arrays["truncated"][where] = truncated[at]
        self._arrays["valid"][where] = True

    def _bootstrap(self, ids: np.ndarray, rows: Observation) -> None:
        """Value the observations that no further chunk of the rollout begins at."""
        if len(ids) and self._actor.needs_values:
            texts = self._texts[ids].tolist()
            values = self._forward(lambda: self._actor.values(rows, texts))
            # The slot counter has moved on already.
            self._arrays["next_values"][self._row_of(ids), self._slot[ids] - 1] = values

    def _act(self, ids: np.ndarray, rows: Observation) -> None:
        if not len(ids):
            return
        texts = self._texts[ids].tolist()
        keys = np.stack([self._seeds[ids], self._episode[ids], self._chunk[ids]], axis=1)
        act: Act = self._forward(lambda: self._actor.act(rows, texts, keys))
        row, slot = self._row_of(ids), self._slot[ids]
        for key, value in rows.items():
            self._arrays[key][row, slot] = value
        self._arrays["instruction"][row, slot] = [self._out.instruction_id(t) for t in texts]
        for key, tensor in act._asdict().items():
            if key in self._arrays and tensor is not None:
                self._arrays[key][row, slot] = tensor.cpu().numpy()
        inner = (self._chunk[ids] > 0) & (slot > 0)
        values = act.values.cpu().numpy()
        self._arrays["next_values"][row[inner], slot[inner] - 1] = values[inner]
        actions = act.actions[:, : self.chunk_len].cpu().numpy().astype(np.float32)
        self.envs.send(np.clip(actions, -1.0, 1.0), ids)
        self._busy[ids] = True

    def _send_resets(self, ids: np.ndarray) -> None:
        """Let environments whose episode is over reset themselves; their action is ignored."""
        if len(ids):
            shape = self.envs.single_action_space.shape or ()
            self.envs.send(np.zeros((len(ids), *shape), np.float32), ids)
            self._resetting[ids], self._busy[ids] = True, True

    def _forward(self, function: Any) -> Any:
        return self._clocked(function, "forward")

    def _clocked(self, function: Any, name: str = "environment") -> Any:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self._time[name] += time.perf_counter() - began
