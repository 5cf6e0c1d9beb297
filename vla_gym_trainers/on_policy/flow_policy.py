"""A policy that is a flow-matching VLA with noise in its denoising steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym.vla.base import TrainableFlowVLA
from vla_gym_trainers.on_policy.flow_chain import FlowChain
from vla_gym_trainers.on_policy.policy import Observation, ValueHead
from vla_gym_trainers.on_policy.vla_policy import Distributed, VLAPolicy


class FlowPolicy(VLAPolicy):
    """A flow-matching VLA with noise in its denoising steps; see :class:`FlowChain`.

    A sample is the chain of all steps, (K + 1, C, A); acting greedily has no noise. The value head
    reads the first hidden state at the beginning of the greedy flow.
    """

    protocol, by = TrainableFlowVLA, "by noise in its flow"

    def __init__(
        self,
        vla: Any,
        *,
        noise: float = 0.5,
        stochastic_steps: int | None = None,
        correlation: float = 0.0,
        fixed_start: bool = False,
        value_head: ValueHead | None = None,
    ) -> None:
        """Make a policy; the noise is that of :class:`FlowChain`, ``stochastic_steps`` None: all.

        Raises:
            ConfigError: If the VLA is no flow, or has fewer denoising steps.
        """
        super().__init__(vla, value_head)
        steps = vla.num_steps if stochastic_steps is None else stochastic_steps
        if not 1 <= steps <= vla.num_steps:
            raise ConfigError(
                f"stochastic_steps must be in 1..{vla.num_steps} (the VLA's denoising steps; "
                f"without noise there is nothing to reinforce), got {steps}."
            )
        self.noise = noise
        self._chain = partial(
            FlowChain,
            num_steps=vla.num_steps,
            stochastic_steps=steps,
            action_size=self.chunk_shape[1],
            correlation=correlation,
            fixed_start=fixed_start,
        )
        blank = {  # to learn the shape of what the VLA makes of it
            name: torch.zeros(1, *shape, dtype=dtype).numpy()
            for name, (shape, dtype) in self.observation.items()
        }
        with torch.no_grad():
            start = vla.flow_outputs(*self._inputs(blank, ["move"])).start
        self.factors = (steps, *self.chunk_shape)
        self.sample = (vla.num_steps + 1, *start.shape[1:]), torch.float32

    def distribution(self, observation: Observation, instructions: Sequence[str]) -> Distributed:
        """Run the VLA, without the flow."""
        flow = self.vla.flow_outputs(*self._inputs(observation, instructions))
        chain = self._chain(flow, noise=self.noise * (self.noise_share or 1.0))
        if self.value_head is None:
            return chain, None
        with torch.no_grad():
            hidden, _ = flow.velocity(flow.start, 0.0)
        return chain, self._value_input(hidden[:, 0])

    def actions(self, sample: Tensor, observation: Observation) -> Tensor:  # noqa: ARG002
        """Return the environment's actions of the chains' ends."""
        return self.vla.flow_to_env(sample[:, -1])
