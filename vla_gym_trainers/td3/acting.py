"""The actor that collects: a copy of its own, on a device of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_gym_trainers.rollout.chunks import ChunkStep
from vla_gym_trainers.rollout.collector import Collector, Transition
from vla_gym_trainers.rollout.pipeline import Pipeline
from vla_gym_trainers.runs.stopwatch import Stopwatch
from vla_gym_trainers.td3.config import TD3Config
from vla_gym_trainers.td3.exploration import ChunkNoise
from vla_gym_trainers.td3.networks import reference_chunk

if TYPE_CHECKING:
    from vla_gym_trainers.td3.policy import RLTokenPolicy


#: Seconds for one block of chunks, after which collecting counts as hung. The vector environment's
#: own deadlines, with restarts of its workers, are shorter.
BLOCK_SECONDS = 3600.0


class ActorWeights(NamedTuple):
    """Copies of what acts; nobody changes them.

    Attributes:
        actor: State dict of the actor.
        normalizer: State dict of the normaliser.
    """

    actor: dict[str, Tensor]
    normalizer: dict[str, Tensor]

    @classmethod
    def of(cls, policy: RLTokenPolicy) -> ActorWeights:
        """Return what a policy would act with now."""
        nets = policy.actor.state_dict(), policy.normalizer.state_dict()
        return cls(*({key: value.clone() for key, value in net.items()} for net in nets))


class ActingPolicy:
    """Plays the weights that it was given, on a device of its own, whatever the learner does.

    Attributes:
        device: Where it computes.
    """

    def __init__(self, policy: RLTokenPolicy, device: torch.device | str) -> None:
        """Copy the actor and the normaliser of a policy to a device."""
        self.device = torch.device(device)
        self.actor = copy.deepcopy(policy.actor).requires_grad_(False).to(self.device)
        self.normalizer = copy.deepcopy(policy.normalizer).to(self.device)

    def load(self, weights: ActorWeights) -> None:
        """Play these weights from now on."""
        self.actor.load_state_dict(weights.actor)
        self.normalizer.load_state_dict(weights.normalizer)

    @torch.no_grad()
    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the chunks (N, C, action size) float32 of N observations."""
        tensors = {
            key: torch.as_tensor(np.asarray(observation[key]), device=self.device)
            for key in ("rl_token", "proprio", "vla_action")
        }
        reference = reference_chunk(tensors)
        chunk = self.actor(self.normalizer(tensors), reference)
        # An observation that is not finite must not reach the simulation: it gets the VLA's chunk.
        chunk = torch.where(chunk.isfinite(), chunk, reference.nan_to_num(0.0, 0.0, 0.0))
        return np.asarray(chunk.reshape(tensors["vla_action"].shape).cpu().numpy())


class ChunkPlayer:
    """Collects blocks of chunks with the actor, or with the VLA in the warm-up, plus noise."""

    def __init__(
        self,
        collector: Collector,
        acting: ActingPolicy,
        exploration: ChunkNoise,
        config: TD3Config,
        begun: int,
    ) -> None:
        """Put together what plays.

        Args:
            collector: Steps the environments.
            acting: Plays the weights of each block.
            exploration: Noise, added to every chunk.
            config: Its ``learning_starts`` and ``train_freq`` are used.
            begun: Chunks collected before.
        """
        self.collector, self.acting, self.exploration = collector, acting, exploration
        self.config, self.begun = config, begun

    def collect(self, weights: ActorWeights, clock: Stopwatch) -> list[Transition]:
        """Play ``train_freq`` chunks in each environment."""
        self.acting.load(weights)
        num_envs = self.collector.num_envs

        def act(obs: Mapping[str, np.ndarray], env_ids: np.ndarray, step: int) -> np.ndarray:
            is_warm_up = self.begun + step * num_envs < self.config.learning_starts
            mean = obs["vla_action"] if is_warm_up else self.acting.act(obs)
            noise = self.exploration.sample(env_ids)
            return np.clip(mean + noise, -1.0, 1.0).astype(np.float32)

        def on_step(env_ids: np.ndarray, step: ChunkStep) -> None:
            self.exploration.end_episodes(env_ids[step.dones])

        with clock("rollout"):
            block = self.collector.collect(act, self.config.train_freq, on_step)
        self.begun += self.config.train_freq * num_envs
        return block


#: Hands blocks out to the learner.
Blocks = Pipeline[ActorWeights, list[Transition]]
