"""A flow's denoising steps with noise: a Markov chain of normal distributions.

After "Flow-SDE" of piRL (arXiv 2510.25889) and Flow-GRPO (arXiv 2505.05470), with a noise schedule
that has no singular end. On the path ``x_t = (1 - t) n + t a`` (t = 0: noise n, t = 1: action a)
a flow-matching network gives the velocity ``v(x, t) = E[a - n | x_t = x]``, so
``E[n | x_t = x] = x - t v`` and the score is ``-(x - t v) / (1 - t)``. For any matrix G the
stochastic equation

``dx = [v + G G^T score / 2] dt + G dW``

has the marginals of the flow ``dx = v dt``. With ``G G^T = noise^2 (1 - t) R`` the drift is
``v - noise^2 R (x - t v) / 2``, finite at both ends. R is the correlation of the noise of the
chunk's control steps, ``R_ij = correlation^|i - j|``. Euler's steps of length 1 / K are

``x_{k+1} ~ N(x_k + [v - noise^2 R (x_k - t_k v) / 2] / K, noise^2 (1 - t_k) R / K)``,

each with a log-probability. The first noise ``x_0 ~ N(0, I)`` does not depend on the parameters:
nothing can be learnt from what it does. A chain may begin instead at the noise at which acting
greedily does; it then has the flow's marginals no more, and all that it explores has a factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_gym.vla.base import FlowOutput
from vla_gym_trainers.on_policy.distributions import GaussianChunk, correlated, keyed_normal


@dataclass
class FlowChain:
    """What a flow with noise does with B observations; a factor is a number of a noisy step.

    Attributes:
        flow: Of B observations, with gradients.
        num_steps: Denoising steps K.
        stochastic_steps: The first so many of them have noise; the others follow the flow.
        noise: Its level, positive.
        action_size: N: the numbers of an action that have noise. What pads them to A follows the
            flow.
        correlation: Of the noise of successive control steps, in [0, 1).
        fixed_start: Begin where acting greedily does, in place of a noise that is drawn.
    """

    flow: FlowOutput
    num_steps: int
    stochastic_steps: int
    noise: float
    action_size: int
    correlation: float = 0.0
    fixed_start: bool = False

    def __post_init__(self) -> None:
        steps = torch.arange(self.flow.start.shape[1])
        distance = (steps[:, None] - steps).abs().float()
        self._matrix = (self.correlation**distance).to(self.flow.start)

    def draw(self, keys: np.ndarray) -> Tensor:
        """Draw chains (B, K + 1, C, A) float32, from the first noise to the actions."""
        shape = self.flow.start.shape[1:]
        white = keyed_normal(keys, (self.stochastic_steps + 1, *shape)).to(self.flow.start)
        chain = [self.flow.start if self.fixed_start else white[:, 0]]
        for k in range(self.num_steps):
            mean, std = self._step(chain[-1], k)
            if std > 0.0:
                wave = correlated(white[:, k + 1, :, : self.action_size], self.correlation)
                noisy = mean[..., : self.action_size] + std * wave
                mean = torch.cat([noisy, mean[..., self.action_size :]], dim=-1)
            chain.append(mean)
        return torch.stack(chain, dim=1)

    @torch.no_grad()
    def mode(self) -> Tensor:
        """Follow the flow without noise from where acting greedily starts, (B, K + 1, C, A)."""
        chain = [self.flow.start]
        for k in range(self.num_steps):
            _, velocity = self.flow.velocity(chain[-1], k / self.num_steps)
            chain.append(chain[-1] + velocity / self.num_steps)
        return torch.stack(chain, dim=1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """Return the log-probabilities (B, S, C, N) of the noisy steps of chains."""
        parts = []
        for k in range(self.stochastic_steps):
            mean, std = self._step(sample[:, k], k)
            step = self._gaussian(mean[..., : self.action_size], std)
            parts.append(step.log_prob(sample[:, k + 1, :, : self.action_size]))
        return torch.stack(parts, dim=1)

    def entropy(self) -> Tensor:
        """Return the noisy steps' entropies (B, S, C, N), which the noise's level fixes."""
        mean = self.flow.start[..., : self.action_size]
        parts = [self._gaussian(mean, self._std(k)).entropy() for k in range(self.stochastic_steps)]
        return torch.stack(parts, dim=1)

    def _step(self, x: Tensor, k: int) -> tuple[Tensor, float]:
        """Return the mean of the next point, and the standard deviation of its noise."""
        time = k / self.num_steps
        _, velocity = self.flow.velocity(x, time)
        std = self._std(k)
        if std == 0.0:
            return x + velocity / self.num_steps, std
        noise = (x - time * velocity)[..., : self.action_size]
        drift = self._matrix @ noise * (0.5 * self.noise**2)
        drift = torch.nn.functional.pad(drift, (0, x.shape[-1] - self.action_size))
        return x + (velocity - drift) / self.num_steps, std

    def _std(self, k: int) -> float:
        if k >= self.stochastic_steps:
            return 0.0
        return self.noise * math.sqrt((1.0 - k / self.num_steps) / self.num_steps)

    def _gaussian(self, mean: Tensor, std: float) -> GaussianChunk:
        return GaussianChunk(mean, mean.new_full(mean.shape[-1:], math.log(std)), self.correlation)
