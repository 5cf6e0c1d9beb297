"""The actor that collects: copies of the learner's, on a device of their own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv

from vla_gym.errors import WorkerError
from vla_gym_trainers.networks import reference_chunk
from vla_gym_trainers.rollout.chunks import ChunkStep, Observation
from vla_gym_trainers.rollout.collector import Collector, Stopwatch
from vla_gym_trainers.runs.sb3_vec_env import envs_of
from vla_gym_trainers.td3.algorithm_config import TD3Config
from vla_gym_trainers.td3.exploration import ChunkNoise
from vla_gym_trainers.td3.policy import RLTokenPolicy

#: Seconds for one block of chunks, after which collecting counts as hung. The vector environment's
#: own deadlines, with restarts of its workers, are shorter.
DEADLINE_S = 3600.0


class ActingPolicy:
    """What acts in a block: a copy of a policy as it is now, which nobody changes.

    Attributes:
        device: Where it computes.
        is_trained: False before the first gradient step, when the VLA acts in the actor's place.
        tasks: How often each task is played, by its id; None: each as often as any other.
    """

    def __init__(
        self,
        policy: RLTokenPolicy,
        device: torch.device | str,
        is_trained: bool = True,
        tasks: dict[int, float] | None = None,
    ) -> None:
        """Copy the actor and the normaliser of a policy to a device."""
        self.device, self.is_trained, self.tasks = torch.device(device), is_trained, tasks
        self.actor = copy.deepcopy(policy.actor).requires_grad_(False).to(self.device)
        self.normalizer = copy.deepcopy(policy.normalizer).to(self.device)

    @torch.no_grad()
    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the chunks (N, C, action size) float32 of N observations."""
        tensors = {
            key: torch.as_tensor(np.asarray(observation[key]), device=self.device)
            for key in (*self.normalizer.inputs, "vla_action")
        }
        reference = reference_chunk(tensors)
        chunk = self.actor(self.normalizer(tensors), reference)
        # An observation that is not finite must not reach the simulation: it gets the VLA's chunk.
        chunk = torch.where(chunk.isfinite(), chunk, reference.nan_to_num(0.0, 0.0, 0.0))
        return np.asarray(chunk.reshape(tensors["vla_action"].shape).cpu().numpy())


@dataclass
class Transition:
    """One chunk of all N environments, in their order; names are those of SB3's callbacks.

    Attributes:
        obs: Observations that were acted on.
        actions: (N, C, 7) chunks.
        next_obs: After the chunk, of the same episode.
        rewards: (N,) float32.
        dones: (N,) bool.
        infos: N dicts; see :class:`ChunkStep`.
        by_actor: The actor chose them, not the VLA in its place.
    """

    obs: Observation
    actions: np.ndarray
    next_obs: Observation
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]
    by_actor: bool

    @classmethod
    def empty(
        cls, num_envs: int, obs: Observation, actions: np.ndarray, by_actor: bool
    ) -> Transition:
        """Take the memory for N environments whose rows are like these."""

        def rows(like: np.ndarray) -> np.ndarray:
            return np.empty((num_envs, *like.shape[1:]), like.dtype)

        before, after = ({k: rows(v) for k, v in obs.items()} for _ in range(2))
        rewards, dones = np.empty(num_envs, np.float32), np.empty(num_envs, bool)
        infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        return cls(before, rows(actions), after, rewards, dones, infos, by_actor)


#: Successive chunks, ``train_freq`` in each environment.
Block = list[Transition]


class ChunkPlayer:
    """Plays blocks of chunks with the actor, or with the VLA in the warm-up, plus noise."""

    def __init__(
        self,
        env: VecEnv,
        obs: Observation,
        exploration: ChunkNoise,
        clock: Stopwatch,
        config: TD3Config,
        begun: int,
    ) -> None:
        """Play on from ``obs``, see :class:`.Collector`; ``begun`` chunks were collected before."""
        self.exploration, self.clock = exploration, clock
        self.collector = Collector(envs_of(env), config.groups, obs)
        self.config, self.begun = config, begun
        self._set_tasks = partial(env.env_method, "set_task_weights")
        self._envs = getattr(env, "vector_env", None)
        # Of an ExplorerActions, if there is one around the environments.
        self._explore = getattr(self._envs, "explore", None)
        self._block: Block = []
        self._played = np.zeros(env.num_envs, np.int64)  # chunks of this block

    def collect(self, acting: ActingPolicy, _: int) -> Block:
        """Play a block."""
        if acting.tasks is not None:
            # A worker that dies over it is replaced, and plays without until the next block.
            with contextlib.suppress(WorkerError):
                self._set_tasks(acting.tasks)
        self._acting, self._block = acting, []
        self._played[:] = 0
        vla_seconds = self._vla_seconds()
        with self.clock("rollout"):
            self.collector.collect(self)
        self.clock.add("forward", self._vla_seconds() - vla_seconds)
        self.begun += self.config.train_freq * len(self._played)
        return self._block

    def _vla_seconds(self) -> float:
        return float(getattr(self._envs, "vla_seconds", 0.0))

    def act(self, obs: Observation, env_ids: np.ndarray) -> np.ndarray:
        """Choose chunks and begin their transitions."""
        played = int(self._played[env_ids[0]])
        is_warm_up = self.begun + played * len(self._played) < self.config.learning_starts
        # Collecting may be ahead of learning: an untrained plain actor is no policy yet.
        is_trained = self._acting.is_trained and not is_warm_up
        mean = self._acting.act(obs) if is_trained else np.nan_to_num(obs["vla_action"])
        noise = self.exploration.sample(env_ids)
        actions = np.clip(mean + noise, -1.0, 1.0).astype(np.float32)
        if is_warm_up and self._explore is not None:
            actions = self._explore(actions, env_ids)
        if played == len(self._block):
            self._block.append(Transition.empty(len(self._played), obs, actions, is_trained))
        transition = self._block[played]
        _write(transition.obs, obs, env_ids)
        transition.actions[env_ids] = actions
        return actions

    def take(self, env_ids: np.ndarray, step: ChunkStep) -> np.ndarray:
        """Complete the transitions; all go on until the block is full."""
        transition = self._block[int(self._played[env_ids[0]])]
        _write(transition.next_obs, step.next_obs, env_ids)
        transition.rewards[env_ids], transition.dones[env_ids] = step.rewards, step.dones
        for i, info in zip(env_ids.tolist(), step.infos, strict=True):
            transition.infos[i] = info
        self.exploration.end_episodes(env_ids[step.dones])
        self._played[env_ids] += 1
        return self._played[env_ids] < self.config.train_freq


def _write(into: Observation, rows: Observation, env_ids: np.ndarray) -> None:
    for key, value in rows.items():
        into[key][env_ids] = value
