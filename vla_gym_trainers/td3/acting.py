"""The actor that collects: a copy of its own, on a device of its own, with a version."""

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


class Weights(NamedTuple):
    """What the learner hands over.

    Attributes:
        version: Critic steps of the learner at that moment.
        actor: State dict of the actor.
        normalizer: State dict of the normaliser.
    """

    version: int
    actor: dict[str, Tensor]
    normalizer: dict[str, Tensor]

    @classmethod
    def of(cls, policy: RLTokenPolicy, version: int) -> Weights:
        """Return views of a policy's weights: they change as it learns, see :meth:`clone`."""
        return cls(version, policy.actor.state_dict(), policy.normalizer.state_dict())

    def clone(self) -> Weights:
        """Return a copy that nobody else changes."""
        actor = {key: value.clone() for key, value in self.actor.items()}
        normalizer = {key: value.clone() for key, value in self.normalizer.items()}
        return Weights(self.version, actor, normalizer)


class ActingPolicy:
    """Plays the actor as it was when it was last handed over, whatever the learner does meanwhile.

    Attributes:
        device: Where it computes.
        version: That of its weights.
    """

    def __init__(self, policy: RLTokenPolicy, device: torch.device | str) -> None:
        """Copy the actor and the normaliser of a policy to a device."""
        self.device, self.version = torch.device(device), 0
        self.actor = copy.deepcopy(policy.actor).requires_grad_(False).to(self.device)
        self.normalizer = copy.deepcopy(policy.normalizer).to(self.device)
        self._heads = policy.heads  # reads a table that never changes

    def take_over(self, weights: Weights) -> None:
        """Play these weights from now on."""
        self.actor.load_state_dict(weights.actor)
        self.normalizer.load_state_dict(weights.normalizer)
        self.version = weights.version

    def weights(self) -> Weights:
        """Return a copy of what it plays, on the CPU."""
        nets = [self.actor.state_dict(), self.normalizer.state_dict()]
        actor, normalizer = ({k: v.cpu().clone() for k, v in net.items()} for net in nets)
        return Weights(self.version, actor, normalizer)

    @torch.no_grad()
    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the chunks (N, C, 7) float32 of N observations."""
        tensors = {
            key: torch.as_tensor(np.asarray(observation[key]), device=self.device)
            for key in ("rl_token", "proprio", "vla_action", "task_id")
            if key in observation
        }
        x, head = self.normalizer(tensors), self._heads(tensors)
        reference = reference_chunk(tensors)
        chunk = self.actor(x, reference, head=head)
        # An observation that is not finite must not reach the simulation: it gets the VLA's chunk.
        chunk = torch.where(chunk.isfinite(), chunk, reference.nan_to_num(0.0, 0.0, 0.0))
        return np.asarray(chunk.unflatten(1, (-1, ACTION_DIM)).cpu().numpy())
