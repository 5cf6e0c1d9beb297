"""Plays a vector environment with a policy and writes a rollout."""

from __future__ import annotations

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.base import FrozenVLA
from vla_gym.vla.stateful import VLAMemory
from vla_gym_trainers.on_policy.phases import Actor, MixedActor
from vla_gym_trainers.on_policy.policy import Observation
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.rollout.chunks import ChunkEnvs, ChunkStep
from vla_gym_trainers.rollout.collector import Collector, Stopwatch
from vla_gym_trainers.rollout.memory import EpisodeMemory
from vla_gym_trainers.rollout.reward_terms import reward_metrics


class RolloutCollector:
    """Fills rollouts; see :meth:`collect`.

    Whole episodes (``Rollout.episodes``): each collection starts anew with its seed, and an
    environment that has played its episodes waits for the others. What is played is a function of
    the seed and the parameters. Rows of a fixed length go on where the last collection stopped.

    A transition that died with its worker, or in which a number was not finite, is written as not
    valid. A row of a whole episode that was lost has no end then, and the next one is played as if
    nothing had happened.

    The memory of a recurrent policy is carried from chunk to chunk, zeros where an episode begins,
    also after a worker's death; a rollout holds what it was before each chunk. The value of an
    observation that no further chunk begins at is read with the memory after the last one.

    Attributes:
        chunk_len: Control steps of a chunk.
    """

    def __init__(self, envs: LiberoVectorEnv, *, groups: int = 1) -> None:
        """Take over a vector environment.

        It is chunked, with ``gamma`` and autoreset mode SAME_STEP. With several groups of
        environments they take turns: while one simulates, the VLA works for another.

        Raises:
            ConfigError: If they are not chunked, or cannot be split so.
        """
        size = envs.single_action_space.shape or ()
        if len(size) != 2:
            raise ConfigError(f"Expected chunks, got actions of shape {size}: give a chunk_len.")
        self.chunk_len = size[0]
        self._envs = ChunkEnvs(envs)
        self._collector = Collector(self._envs, groups, {})
        n = envs.num_envs
        # Of the keys of an environment's draws.
        self._seeds, self._episode, self._chunk = (np.zeros(n, np.int64) for _ in range(3))
        # Where its next chunk is written.
        self._played, self._slot = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._finite = np.ones(n, bool)  # whether all numbers of its last observation are
        self._seen: Observation = {}  # what is stored of it
        self._memory = EpisodeMemory({})
        self._clock = Stopwatch()
        self._vla_memory: VLAMemory  # of the VLA of who acted when the running episodes began

    def collect(self, actor: Actor, out: Rollout, *, seed: int) -> Rollout:
        """Play until the rollout ``out``, which is overwritten, is full; return it.

        The actor's parameters must not change meanwhile. The seed is that of layouts and draws;
        with rows of a fixed length, the first one counts, and the first one after :meth:`restart`.

        Raises:
            ConfigError: If rollout and environments do not fit each other.
        """
        if out.num_envs != self._envs.num_envs:
            raise ConfigError(
                f"Expected a rollout of {self._envs.num_envs} environments, got {out.num_envs}."
            )
        out.clear()
        self._out, self._arrays, self._actor = out, out.arrays, actor
        self._policy = actor.policy if isinstance(actor, MixedActor) else actor
        if self._memory.shapes != out.carried:
            self._memory = EpisodeMemory(out.carried)
        with self._clock("rollout"):
            self._slot[:], self._played[:] = 0, 0
            if not self._collector.obs or out.episodes is not None:
                n = out.num_envs
                self._seeds = seed + out.first_env + np.arange(n)
                obs = self._collector.obs = self._envs.reset(seed=self._seeds.tolist())
                self._episode[:], self._chunk[:] = 0, 0
                self._memory.forget(range(n))
                self._vla_memory = VLAMemory(self._policy.vla)
                self._see(np.arange(n), obs, np.ones(n, bool))
            self._collector.collect(self)
        out.seconds = self._clock.lap()
        return out

    def restart(self) -> None:
        """Let the next collection begin new episodes by its seed, whatever the rows."""
        self._collector.obs = {}

    # What the collector asks of who plays

    def act(self, obs: Observation, ids: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """Choose chunks and write what is known before they are executed."""
        rows, texts = {key: value[ids] for key, value in self._seen.items()}, self._texts(ids)
        rows |= self._memory.rows(ids)
        # From 1 on: numpy pads keys with zeros, and (seed, episode) is what layouts are drawn by.
        keys = np.stack([self._seeds[ids], self._episode[ids], self._chunk[ids] + 1], axis=1)
        with self._clock("forward"):
            act = self._actor.act(rows, texts, keys)
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
        actions = np.clip(actions, -1.0, 1.0)
        if act.next_memory is not None:
            self._memory.keep(ids, act.next_memory.cpu().numpy(), actions)
        return actions

    def take(self, ids: np.ndarray, step: ChunkStep) -> np.ndarray:
        """Write what came of the chunks; return which environments have not filled their rows."""
        infos, over = step.infos, step.dones
        for info in infos:
            for name, value in reward_metrics(info.get("reward_terms", {})).items():
                self._out.reward_terms[name].append(value)
        truncated = np.array([info["TimeLimit.truncated"] for info in infos])
        lost = np.array([bool(info.get("worker_restarted", False)) for info in infos])
        full = self._slot[ids] + 1 >= self._out.num_chunks
        if self._out.episodes is None:
            goes_on, is_seen = ~full, np.ones(len(ids), bool)  # full rows: acted on next time
        elif (full & ~over).any():
            raise ConfigError(
                f"An episode is longer than the {self._out.num_chunks} chunks of a row: make the "
                "rollout with more chunks, or the environments with a smaller max_control_steps."
            )
        else:
            goes_on = is_seen = ~over | (self._played[ids] + 1 < self._out.episodes)
        kept = ~lost & self._finite[ids] & np.isfinite(step.rewards) & _are_finite(step.next_obs)
        ends = np.flatnonzero(kept & truncated)
        # The VLA in the episodes that end, before others begin.
        vla = self._vla_memory.at((), ended=ids[ends])
        seen = {key: value[is_seen] for key, value in step.obs.items()}
        self._see(ids[is_seen], seen, over[is_seen])
        kept &= over | self._finite[ids]
        if self._policy.value_head is not None:
            if len(ends):
                texts = [infos[i]["instruction"] for i in ends]
                last = {key: value[ends] for key, value in step.next_obs.items()}
                rows, kept[ends] = self._observe(last, texts, vla)
                self._memory.cut(ids[ends], [infos[i]["executed_steps"] for i in ends])
                self._bootstrap(ids[ends], rows, texts)
            cut = ids[kept & full & ~over]
            if len(cut):
                rows = {key: value[cut] for key, value in self._seen.items()}
                self._bootstrap(cut, rows, self._texts(cut))
        at = np.flatnonzero(kept)
        where = self._row_of(ids[at]), self._slot[ids[at]]
        self._arrays["rewards"][where] = step.rewards[at]
        self._arrays["discounts"][where] = [infos[i]["discount"] for i in at]
        self._arrays["executed"][where] = [infos[i]["executed_steps"] for i in at]
        self._arrays["terminated"][where] = (over & ~truncated)[at]
        self._arrays["truncated"][where] = truncated[at]
        self._arrays["valid"][where] = True
        self._memory.forget(ids[over])  # also where a worker died
        self._count(ids, over)
        return goes_on

    def _count(self, ids: np.ndarray, over: np.ndarray) -> None:
        self._slot[ids] += 1
        self._chunk[ids] += 1
        self._chunk[ids[over]] = 0
        self._episode[ids[over]] += 1
        if self._out.episodes is not None:
            self._played[ids[over]] += 1
            self._slot[ids[over]] = 0

    def _row_of(self, ids: np.ndarray) -> np.ndarray:
        return ids * (self._out.episodes or 1) + self._played[ids]

    def _texts(self, ids: np.ndarray) -> list[str]:
        return [self._envs.reset_infos[i]["instruction"] for i in ids]

    def _see(self, ids: np.ndarray, obs: Observation, begins: np.ndarray) -> None:
        """Keep what is stored of the observations that environments are acted on next."""
        if len(ids):
            vla = self._vla_memory.at(ids, begins)
            rows, self._finite[ids] = self._observe(obs, self._texts(ids), vla)
            for key, value in rows.items():
                if key not in self._seen:
                    self._seen[key] = np.empty((self._out.num_envs, *value.shape[1:]), value.dtype)
                self._seen[key][ids] = value

    def _observe(
        self, obs: Observation, texts: list[str], vla: FrozenVLA
    ) -> tuple[Observation, np.ndarray]:
        """Return what is stored, 0 for numbers that are not finite, and which rows had none."""
        with self._clock("forward"):
            rows = self._policy.observe(obs, texts, vla)
        finite = _are_finite(rows)
        for key, value in rows.items():
            if np.issubdtype(value.dtype, np.floating):
                rows[key] = np.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
        return rows, finite

    def _bootstrap(self, ids: np.ndarray, rows: Observation, texts: list[str]) -> None:
        """Value observations that no further chunk of the rollout begins at."""
        with self._clock("forward"):
            values = self._policy.values(rows | self._memory.rows(ids), texts)
        self._arrays["next_values"][self._row_of(ids), self._slot[ids]] = values.cpu()


def _are_finite(obs: Observation) -> np.ndarray:
    """Return (n,) bool: whether all numbers of a row are."""
    rows = len(next(iter(obs.values())))
    finite = np.ones(rows, bool)
    for value in obs.values():
        if np.issubdtype(value.dtype, np.floating):
            finite &= np.isfinite(value).reshape(rows, -1).all(axis=1)
    return finite
