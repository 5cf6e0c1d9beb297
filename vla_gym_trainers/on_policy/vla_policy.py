"""Policies that are the VLA itself: its tokens, a normal distribution, its own.

They share what is stored of an observation and the value head; each says which distribution it has
there and which chunk a sample is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_gym.errors import ConfigError
from vla_gym.vla.base import (
    Distribution,
    FrozenVLA,
    TrainableActionVLA,
    TrainableTokenVLA,
    TrainableVLA,
)
from vla_gym.vla.preprocess import area_downsample
from vla_gym_trainers.on_policy.distributions import (
    CorrelatedTokens,
    GaussianChunk,
    TokenDistribution,
)
from vla_gym_trainers.on_policy.policy import ArraySpec, Observation, Policy, ValueHead
from vla_gym_trainers.on_policy.student import check_trainable

Distributed = tuple[Distribution, Tensor | None]


class VLAPolicy(Policy):
    """A policy that is a VLA; what of its ``model`` has gradients is trained.

    Attributes:
        vla: The backend.
        cameras: Views that it is shown.
        hidden: Views that it is shown black, see :meth:`hide`.
        stored_size: Side in pixels at which frames are kept.
    """

    #: What the backend must offer.
    protocol: type[Any]
    #: What it is trained by, in messages.
    by: str

    def __init__(self, vla: Any, value_head: ValueHead | None = None) -> None:
        """Make a policy; the subclasses add ``factors`` and ``sample``.

        The value head's loss does not move the VLA; None for GRPO.

        Raises:
            ConfigError: If the VLA does not have what it takes.
        """
        check_trainable(vla, self.protocol, self.by)
        self.vla, self.value_head = vla, value_head
        self.stored_size: int = vla.input_size or vla.image_size
        self.cameras: tuple[str, ...] = vla.cameras
        self.hidden: tuple[str, ...] = ()
        frame: ArraySpec = ((self.stored_size, self.stored_size, 3), torch.uint8)
        self.observation = {camera: frame for camera in self.cameras}
        self.observation["proprio"] = (vla.proprio_size,), torch.float32
        self.observation["task_id"] = (), torch.int64
        self.chunk_shape = (vla.horizon, vla.action_size)
        self.value_size, self.image_size = vla.hidden_size, vla.image_size

    def hide(self, cameras: Sequence[str]) -> None:
        """Show the VLA black in the place of some views, which are no longer observed.

        Raises:
            ConfigError: If it has no such view, or none would be left.
        """
        seen = tuple(camera for camera in self.cameras if camera not in cameras)
        if not seen or not set(cameras) <= set(self.cameras):
            raise ConfigError(
                f"Expected some, not all, of the VLA's cameras {', '.join(self.cameras)} to be "
                f"hidden, got {', '.join(cameras)}."
            )
        self.cameras, self.hidden = seen, tuple(cameras)
        self.observation = {k: v for k, v in self.observation.items() if k not in cameras}

    def observe(
        self,
        observation: Mapping[str, np.ndarray],
        texts: Sequence[str],  # noqa: ARG002
        vla: FrozenVLA | None = None,  # noqa: ARG002
    ) -> Observation:
        """Return the camera images at the size at which the VLA sees them, proprio and task."""
        frames = {camera: observation[camera] for camera in self.cameras}
        if self.stored_size != self.vla.image_size:
            frames = {k: area_downsample(v, self.stored_size) for k, v in frames.items()}
        return {
            **frames,
            "proprio": np.array(observation["proprio"], np.float32),
            "task_id": np.array(observation["task_id"], np.int64),
        }

    def factor_mask(self, executed: Tensor) -> Tensor:
        """Factors of control steps that were never executed took no part."""
        mask = torch.ones(len(executed), *self.factors, dtype=torch.bool)
        if self.factors[-2:] == self.chunk_shape:
            steps = torch.arange(self.chunk_shape[0]) < executed[:, None]
            mask &= steps.reshape(len(executed), *(1,) * (len(self.factors) - 2), steps.shape[1], 1)
        return mask

    def networks(self) -> dict[str, nn.Module]:
        """Return the VLA's network."""
        return {"vla": self.vla.model}

    def _inputs(self, observation: Observation, instructions: Sequence[str]) -> tuple[Any, ...]:
        frames = {camera: observation[camera] for camera in self.cameras}
        black = np.zeros_like(frames[self.cameras[0]])
        frames |= dict.fromkeys(self.hidden, black)
        return frames, list(instructions), observation["proprio"]

    def _value_input(self, features: Tensor) -> Tensor | None:
        return None if self.value_head is None else features.detach().float()


class TokenPolicy(VLAPolicy):
    """A policy over the tokens of a VLA; a sample is a chunk's tokens, (C, 7).

    With a correlation the tokens of successive control steps are drawn as
    :class:`CorrelatedTokens`. The value head reads the hidden state of the first action query.

    Attributes:
        temperature: Of drawing and of log-probabilities, positive, while there is all of the noise.
        correlation: In [0, 1).
    """

    protocol, by = TrainableTokenVLA, "on its tokens"

    def __init__(
        self,
        vla: Any,
        *,
        temperature: float = 1.0,
        correlation: float = 0.0,
        value_head: ValueHead | None = None,
    ) -> None:
        """Make a policy; see the class and :class:`VLAPolicy`."""
        super().__init__(vla, value_head)
        self.temperature, self.correlation = temperature, correlation
        self.factors, self.sample = self.chunk_shape, (self.chunk_shape, torch.uint8)

    def distribution(self, observation: Observation, instructions: Sequence[str]) -> Distributed:
        """Run the VLA."""
        hidden, logits = self.vla.token_outputs(*self._inputs(observation, instructions))
        temperature = self.temperature * (self.noise_share or 1.0)
        seen = TokenDistribution(logits, temperature)
        if self.correlation:
            seen = CorrelatedTokens(logits, temperature, self.correlation)
        return seen, self._value_input(hidden[:, 0])

    def actions(self, sample: Tensor, observation: Observation) -> Tensor:  # noqa: ARG002
        """Return the actions of tokens."""
        return self.vla.tokens_to_actions(sample)


class GaussianPolicy(VLAPolicy):
    """A normal distribution around the actions that a VLA regresses, in its own units.

    ``a ~ N(mu(o), diag sigma^2)`` for each control step; with a correlation the noise of
    successive steps of a chunk is a stationary autoregression (see :class:`GaussianChunk`). A
    sample is a chunk (C, N). The value head reads the hidden state of the first action query.
    """

    protocol, by = TrainableActionVLA, "by a normal distribution"

    def __init__(
        self,
        vla: Any,
        *,
        sigmas: Sequence[float],
        min_sigma: float = 0.01,
        learn_sigma: bool = True,
        correlation: float = 0.0,
        value_head: ValueHead | None = None,
    ) -> None:
        """Make a policy.

        Args:
            vla: See :class:`VLAPolicy`.
            sigmas: (N,) standard deviations at the start, in the policy's own units.
            min_sigma: The smallest share of them that learning may reach.
            learn_sigma: Whether they are learned.
            correlation: In [0, 1).
            value_head: See the class.

        Raises:
            ConfigError: If the VLA regresses no actions, or a number is out of range.
        """
        super().__init__(vla, value_head)
        start = torch.tensor(sigmas, dtype=torch.float32)
        if not bool(((start > 0.0) & start.isfinite()).all()):
            raise ConfigError(f"Standard deviations must be positive numbers, got {sigmas}.")
        device = next(vla.model.parameters()).device
        log_std = nn.Parameter(start.log(), requires_grad=learn_sigma)
        self.noise = nn.ParameterDict({"log_std": log_std}).to(device)
        self.start, self.floor = start.log().to(device), (start * min_sigma).log().to(device)
        self.correlation = correlation
        self.factors, self.sample = self.chunk_shape, (self.chunk_shape, torch.float32)

    def distribution(self, observation: Observation, instructions: Sequence[str]) -> Distributed:
        """Run the VLA."""
        hidden, mean = self.vla.action_outputs(*self._inputs(observation, instructions))
        seen = GaussianChunk(mean.float(), self.noise["log_std"], self.correlation)
        return seen, self._value_input(hidden[:, 0])

    def actions(self, sample: Tensor, observation: Observation) -> Tensor:  # noqa: ARG002
        """Return the environment's actions."""
        return self.vla.to_env(sample)

    def networks(self) -> dict[str, nn.Module]:
        """Return the VLA's network and sigma."""
        return {**super().networks(), "noise": self.noise}

    @torch.no_grad()
    def bound(self) -> None:
        """Keep sigma above its floor, and at most at ``noise_share`` of what it began with."""
        most = None if self.noise_share is None else self.start + math.log(self.noise_share)
        self.noise["log_std"].clamp_(min=self.floor, max=most)


class OwnPolicy(VLAPolicy):
    """A VLA with a distribution of its own; see :class:`~vla_gym.vla.base.TrainableVLA`."""

    protocol, by = TrainableVLA, "by a distribution of its own"

    def __init__(self, vla: Any, *, value_head: ValueHead | None = None) -> None:
        """Make a policy; see :class:`VLAPolicy`."""
        super().__init__(vla, value_head)
        self.factors, self.sample = tuple(vla.factors), (tuple(vla.sample_shape), vla.sample_dtype)

    def distribution(self, observation: Observation, instructions: Sequence[str]) -> Distributed:
        """Ask the VLA."""
        seen, features = self.vla.distribution(*self._inputs(observation, instructions))
        return seen, self._value_input(features)

    def actions(self, sample: Tensor, observation: Observation) -> Tensor:  # noqa: ARG002
        """Return what the VLA makes of samples."""
        return self.vla.sample_to_env(sample)
