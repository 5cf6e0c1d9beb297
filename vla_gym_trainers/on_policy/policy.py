"""A stochastic policy over action samples, with an optional value head.

:class:`Policy` is what the collector, the learner and the validation know; a kind of policy says
what it stores of an observation, which distribution it has there, and which chunk a sample is.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from vla_gym.errors import ConfigError
from vla_gym.vla.base import Distribution, FrozenVLA
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.rollout.memory import MEMORY, PREVIOUS_ACTION

#: Named arrays of B rows each; which ones there are is the policy's business.
Observation = dict[str, np.ndarray]
#: Shape of one row and dtype.
ArraySpec = tuple[tuple[int, ...], torch.dtype]


class Act(NamedTuple):
    """What a policy does with B observations; no gradients.

    Attributes:
        sample: (B, ...) what was drawn.
        log_probs: (B, *factors) float32 of the sample.
        values: (B,) float32; zeros without a value head.
        actions: (B, C, 7) float32 in [-1, 1], what the environment executes.
        value_input: (B, H) float32 that the values were read off; None without a value head.
        teacher_sample: (B, ...) of a teacher, or None.
        by_teacher: (B,) bool: these chunks are the teacher's; None if there is no teacher.
        next_memory: (B, S) float32 after the observations; None without a memory.
    """

    sample: Tensor
    log_probs: Tensor
    values: Tensor
    actions: Tensor
    value_input: Tensor | None
    teacher_sample: Tensor | None = None
    by_teacher: Tensor | None = None
    next_memory: Tensor | None = None


class ValueHead(nn.Module):
    """Value of a state, read off H numbers; 0 when fresh."""

    def __init__(self, hidden_size: int, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.fc1, self.fc2 = nn.Linear(hidden_size, width), nn.Linear(width, 1)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, value_input: Tensor) -> Tensor:
        """Map (B, H) to values (B,)."""
        hidden = nn.functional.gelu(self.fc1(self.norm(value_input.float())))
        return self.fc2(hidden).squeeze(-1)


class Policy(ABC):
    """A policy over action samples; its networks stay in ``eval()`` mode.

    (With dropout the first probability ratio is not 1: :meth:`set_dropout`.)

    With a recurrent memory an observation has two more arrays: ``memory`` (B, S), the state before
    it, and ``previous_action`` (B, C, 7), the chunk that was executed before; both are zeros at an
    episode's first chunk. Who plays adds them and carries the state on, see ``Act.next_memory``: so
    a policy stays a function of its observation.

    Attributes:
        vla: The VLA that it looks through, or that it is.
        value_head: Maps ``value_input`` (B, H) to values (B,), or None.
        observation: What is stored of an observation, by name.
        sample: Of a sample.
        factors: Shape of one row of log-probabilities.
        value_size: H.
        image_size: Of the frames that it observes, in pixels.
        memory_size: S, size of the recurrent state; 0: no memory.
        frozen: A VLA beside the networks that nobody trains, or None; copies share it.
        noise_share: What a temperature or a flow's noise is multiplied by, and the share of their
            first values that standard deviations may have at most; None: 1, and these have none.
    """

    vla: Any
    value_head: nn.Module | None
    observation: dict[str, ArraySpec]
    sample: ArraySpec
    factors: tuple[int, ...]
    value_size: int
    image_size: int
    memory_size: int = 0
    frozen: Any = None
    noise_share: float | None = None

    @abstractmethod
    def observe(
        self,
        observation: Mapping[str, np.ndarray],
        texts: Sequence[str],
        vla: FrozenVLA | None = None,
    ) -> Observation:
        """Return what is stored of the environments' observations, and what :meth:`act` takes.

        But for what is carried from chunk to chunk, which the environments do not know.

        Args:
            observation: Of B environments.
            texts: Their instructions.
            vla: The policy's frozen VLA as ``VLAMemory.at`` returns it for these environments, in
                whose episodes a stateful one goes on; None: each row is the first of an episode.
        """

    @abstractmethod
    def distribution(
        self, observation: Observation, instructions: Sequence[str]
    ) -> tuple[Distribution, Tensor | None]:
        """Return the distribution and the value head's input, with gradients."""

    @abstractmethod
    def actions(self, sample: Tensor, observation: Observation) -> Tensor:
        """Return the chunks (B, C, 7) in [-1, 1] that samples (B, ...) stand for."""

    @abstractmethod
    def factor_mask(self, executed: Tensor) -> Tensor:
        """Return (B, *factors) bool: the factors that took part in so many control steps (B,)."""

    @abstractmethod
    def networks(self) -> dict[str, nn.Module]:
        """Return the networks, by the prefix of their parameters' names."""

    def remember(self, observation: Observation) -> Tensor | None:  # noqa: ARG002
        """Return the memory (B, S) after observations, with gradients; None without a memory."""
        return None

    @property
    def carried(self) -> dict[str, tuple[int, ...]]:
        """Shapes, by name, of what is carried from chunk to chunk; empty without a memory."""
        names = (MEMORY, PREVIOUS_ACTION) if self.memory_size else ()
        return {name: self.observation[name][0] for name in names}

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return next(next(iter(self.networks().values())).parameters()).device

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        instructions: Sequence[str],
        keys: np.ndarray | None = None,
    ) -> Act:
        """Choose chunks.

        Args:
            observation: From :meth:`observe`, and what is carried.
            instructions: B texts.
            keys: (B, k) integers; row i's draw is a function of ``keys[i]``. None takes the most
                likely samples.
        """
        distribution, value_input = self.distribution(observation, instructions)
        sample = distribution.mode() if keys is None else distribution.draw(keys)
        return Act(
            sample,
            distribution.log_prob(sample),
            self.values_of(value_input, len(sample)),
            self.actions(sample, observation),
            value_input,
            next_memory=self.remember(observation),
        )

    @torch.no_grad()
    def values(self, observation: Observation, instructions: Sequence[str]) -> Tensor:
        """Return the values (B,) of observations."""
        if self.value_head is None:
            return torch.zeros(len(instructions), device=self.device)
        return self.values_of(self.distribution(observation, instructions)[1], len(instructions))

    def values_of(self, value_input: Tensor | None, count: int) -> Tensor:
        """Return the values (count,) of inputs (count, H); zeros without a value head."""
        if self.value_head is None or value_input is None:
            return torch.zeros(count, device=self.device)
        return self.value_head(value_input)

    # Parameters

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by name; ``value_head.*`` is what the value head has."""
        named = {
            f"{prefix}.{name}": p
            for prefix, module in self.networks().items()
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        if self.value_head is not None:
            named |= {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}
        return named

    def named_tensors(self) -> dict[str, Tensor]:
        """Return all that changes in training: the parameters, and statistics if there are any."""
        return dict(self.named_parameters())

    def begin(self, data: TensorDict, group: ProcessGroup) -> None:  # noqa: B027
        """Look at the data of a run's first rollout, before anything is learnt from it."""

    def set_dropout(self, active: bool) -> bool:
        """Switch the adapters' dropout, off but for learning; tell whether there is any."""
        found = False
        for network in self.networks().values():
            for name, module in network.named_modules():
                if "lora_dropout." in name and isinstance(module, nn.Dropout) and module.p > 0.0:
                    module.train(active)
                    found = True
        return found

    def bound(self) -> None:  # noqa: B027
        """Bring parameters back into their range after a step of the optimiser."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what changes in training, on the CPU."""
        return {k: p.detach().cpu().clone() for k, p in self.named_tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            ConfigError: If names or shapes differ.
        """
        mine = self.named_tensors()
        shapes = {k: tuple(p.shape) for k, p in mine.items()}
        theirs = {k: tuple(v.shape) for k, v in state.items()}
        if shapes != theirs:
            wrong = sorted(
                k for k in shapes.keys() | theirs.keys() if shapes.get(k) != theirs.get(k)
            )
            raise ConfigError(
                f"These parameters do not fit the policy; {len(wrong)} differ in name or shape: "
                f"{', '.join(wrong[:5])}."
            )
        if bad := sorted(name for name, value in state.items() if not value.isfinite().all()):
            raise ConfigError(
                f"These parameters are not finite: {', '.join(bad[:5])}. Go on from an earlier "
                "checkpoint, with a smaller learning rate."
            )
        for name, p in mine.items():
            p.copy_(state[name])

    def copy(self) -> Policy:
        """Return a policy with its own copy of what is trained; frozen weights are shared.

        For who acts while this one learns, and for a reference that stays: costs the memory of the
        trained parameters alone. Its parameters are changed by :meth:`load_state_dict` only.
        """
        shared: dict[int, Any] = {id(self.frozen): self.frozen}
        changing = {id(tensor) for tensor in self.named_tensors().values()}
        seen_through = [getattr(x, "model", x) for x in (self.vla, getattr(self, "encoder", None))]
        for module in (*self.networks().values(), *seen_through):
            if isinstance(module, nn.Module):
                tensors = (*module.parameters(), *module.buffers())
                shared |= {id(tensor): tensor for tensor in tensors if id(tensor) not in changing}
        for p in self.named_parameters().values():
            p.grad = None
        return copy.deepcopy(self, shared)
