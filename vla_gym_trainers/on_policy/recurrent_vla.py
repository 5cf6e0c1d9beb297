"""A VLA with a recurrent memory: a normal distribution whose mean the memory moves.

What the memory takes in is what the frozen VLA makes of the view, so it is learnt through time
without running the VLA again: the features are stored with the observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_gym.vla.base import FrozenVLA
from vla_gym_trainers.on_policy.distributions import GaussianChunk
from vla_gym_trainers.on_policy.policy import Observation
from vla_gym_trainers.on_policy.vla_policy import Distributed, GaussianPolicy
from vla_gym_trainers.rollout.memory import MEMORY, PREVIOUS_ACTION

FEATURES = "features"


class ViewMemory(nn.Module):
    """``h_t = GRU(h_{t-1}, [f_t, ..., f_{t-n+1}, a_{t-1}])``, f the normalised features of a view.

    Its state is h_t and the features of the last n - 1 views; before an episode's first view all
    of it is 0. It moves the mean of a chunk by ``W h_t``, with W = 0 at the start.

    Attributes:
        hidden: Numbers of h.
        size: Numbers S of a state.
    """

    def __init__(
        self, features: int, action: int, chunk: tuple[int, ...], hidden: int, history: int
    ) -> None:
        """Begin with a memory that moves nothing.

        ``features``, ``action`` and ``hidden`` count the numbers of f, a and h, ``history`` is n,
        and ``chunk`` the shape of the mean.
        """
        super().__init__()
        self.hidden, self.size = hidden, hidden + (history - 1) * features
        self.chunk = chunk
        self.gru = nn.GRUCell(history * features + action, hidden)
        self.out = nn.Linear(hidden, int(np.prod(chunk)))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, state: Tensor, features: Tensor, previous: Tensor) -> Tensor:
        """Return the states (B, S) after views with features (B, F)."""
        hidden, past = state.split([self.hidden, self.size - self.hidden], dim=1)
        views = torch.cat([F.layer_norm(features, features.shape[1:]), past], dim=1)
        hidden = self.gru(torch.cat([views, previous.flatten(1)], dim=1), hidden)
        return torch.cat([hidden, views[:, : past.shape[1]]], dim=1)

    def offset(self, state: Tensor) -> Tensor:
        """Return what states (B, S) add to the mean, (B, *chunk)."""
        return self.out(state[:, : self.hidden]).view(-1, *self.chunk)


class RecurrentGaussianPolicy(GaussianPolicy):
    """:class:`GaussianPolicy` with a :class:`ViewMemory`; the value head reads h as well.

    Attributes:
        memory: What remembers.
    """

    def __init__(
        self, vla: Any, *, frozen: Any, chunk_len: int, memory_size: int, history: int, **rest: Any
    ) -> None:
        """Make a :class:`GaussianPolicy`, whose ``value_head`` reads ``memory_size`` numbers more.

        The memory takes in ``history`` views as features of ``frozen``, the VLA as it was loaded,
        and of each chunk the ``chunk_len`` control steps that are executed.
        """
        super().__init__(vla, **rest)
        self.frozen, size = frozen, frozen.hidden_size
        executed = chunk_len, self.chunk_shape[1]
        self.memory = ViewMemory(
            size, executed[0] * executed[1], self.chunk_shape, memory_size, history
        ).to(self.floor.device)
        self.memory_size = self.memory.size
        self.value_size += memory_size
        self.observation |= {
            FEATURES: ((size,), torch.float32),
            MEMORY: ((self.memory.size,), torch.float32),
            PREVIOUS_ACTION: (executed, torch.float32),
        }

    @torch.no_grad()
    def observe(
        self,
        observation: Mapping[str, np.ndarray],
        texts: Sequence[str],
        vla: FrozenVLA | None = None,
    ) -> Observation:
        """Return what is stored of any VLA's observations, and the frozen VLA's features."""
        seen = super().observe(observation, texts, vla)
        hidden = self.frozen.infer(*self._inputs(seen, texts)).hidden
        return {**seen, FEATURES: hidden.float().mean(dim=1).cpu().numpy()}

    def remember(self, observation: Observation) -> Tensor:
        """Return the memory (B, S) after observations, with gradients."""
        names = MEMORY, FEATURES, PREVIOUS_ACTION
        return self.memory(*(torch.as_tensor(observation[n]).to(self.device) for n in names))

    def distribution(self, observation: Observation, instructions: Sequence[str]) -> Distributed:
        """Run the VLA, and move its mean. The value loss trains the memory as well."""
        hidden, mean = self.vla.action_outputs(*self._inputs(observation, instructions))
        state = self.remember(observation)
        mean = mean.float() + self.memory.offset(state)
        value_input = self._value_input(hidden[:, 0])
        if value_input is not None:
            value_input = torch.cat([value_input, state[:, : self.memory.hidden]], dim=1)
        return GaussianChunk(mean, self.noise["log_std"], self.correlation), value_input

    def networks(self) -> dict[str, nn.Module]:
        """Return the VLA's network, sigma and the memory."""
        return {**super().networks(), "memory": self.memory}
