"""The actor that collects: a copy of its own, on a device of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_gym_trainers.td3.networks import ACTION_DIM, reference_chunk

if TYPE_CHECKING:
    from vla_gym_trainers.td3.policy import RLTokenPolicy


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
        """Return the chunks (N, C, 7) float32 of N observations."""
        tensors = {
            key: torch.as_tensor(np.asarray(observation[key]), device=self.device)
            for key in ("rl_token", "proprio", "vla_action")
        }
        reference = reference_chunk(tensors)
        chunk = self.actor(self.normalizer(tensors), reference)
        # An observation that is not finite must not reach the simulation: it gets the VLA's chunk.
        chunk = torch.where(chunk.isfinite(), chunk, reference.nan_to_num(0.0, 0.0, 0.0))
        return np.asarray(chunk.unflatten(1, (-1, ACTION_DIM)).cpu().numpy())
