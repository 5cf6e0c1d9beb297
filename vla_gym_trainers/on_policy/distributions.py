"""Distributions over action samples, drawn so that a row's draw depends on its own key alone.

A sample is what a policy draws for one chunk: tokens, or the coefficients of a correction. It has
FACTORS, independent parts with a log-probability each; ``(B, *factors)`` is the shape of
log-probabilities and entropies. All that learning asks of a distribution is in
:class:`Distribution`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Distribution(Protocol):
    """What a policy would do with B observations."""

    def draw(self, keys: np.ndarray) -> Tensor:
        """Return samples (B, ...); row i is a function of ``keys[i]`` and its own observation."""

    def mode(self) -> Tensor:
        """Return the most likely samples (B, ...)."""

    def log_prob(self, sample: Tensor) -> Tensor:
        """Return log-probabilities (B, *factors)."""

    def entropy(self) -> Tensor:
        """Return entropies (B, *factors) in nats."""


class TokenDistribution:
    """Independent softmax distributions of a chunk's tokens; a factor is a token, (C, 7)."""

    def __init__(self, logits: Tensor, temperature: float = 1.0) -> None:
        """Take logits (B, C, 7, 256) and a positive temperature."""
        self.logits, self.temperature = logits, temperature

    def draw(self, keys: np.ndarray) -> Tensor:
        """Draw tokens (B, C, 7) int64."""
        uniform = keyed_uniform(keys, self.logits.shape[1:-1])
        return draw_tokens(self.logits, uniform, self.temperature)

    def mode(self) -> Tensor:
        """Return the most likely tokens (B, C, 7) int64."""
        return self.logits.detach().argmax(dim=-1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """Return the tokens' log-probabilities (B, C, 7) at the temperature."""
        scaled = (self.logits.float() / self.temperature).log_softmax(dim=-1)
        return scaled.gather(-1, sample.long()[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return ``-sum_b p_b log p_b`` at the temperature, (B, C, 7), 0 to log 256 nats."""
        log_p = (self.logits.float() / self.temperature).log_softmax(dim=-1)
        return -(log_p.exp() * log_p).sum(dim=-1)


class GaussianChunk:
    """A diagonal normal distribution of K x 7 numbers, ``N(mu, diag sigma^2)``; each is a factor.

    The numbers are the coefficients of K functions of time, or (K = C) the control steps of a chunk
    themselves.
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        """Take means (B, K, 7) and log-standard deviations (7,) or (K, 7), learned or fixed."""
        self.mean, self.log_std = mean, log_std

    def draw(self, keys: np.ndarray) -> Tensor:
        """Draw numbers (B, K, 7) float32."""
        noise = keyed_normal(keys, self.mean.shape[1:]).to(self.mean)
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """Return the means."""
        return self.mean.detach()

    def log_prob(self, sample: Tensor) -> Tensor:
        """``-(v - mu)^2 / (2 sigma^2) - log sigma - log(2 pi) / 2`` of each number, (B, K, 7)."""
        z = (sample - self.mean) / self.log_std.exp()
        return -0.5 * z.square() - self.log_std - 0.5 * math.log(2.0 * math.pi)

    def entropy(self) -> Tensor:
        """``log sigma + log(2 pi e) / 2`` of each number, (B, K, 7)."""
        return (self.log_std + 0.5 * math.log(2.0 * math.pi * math.e)).expand_as(self.mean)


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draw from softmax(logits / temperature) by inverting its distribution function.

    Args:
        logits: (..., 256).
        uniform: (...) float64 in [0, 1).
        temperature: Positive.

    Returns:
        (...) int64: the first bin whose cumulative probability exceeds the uniform number.
    """
    cumulative = (logits.float() / temperature).softmax(dim=-1).double().cumsum(dim=-1)
    reached = uniform.to(logits.device)[..., None] * cumulative[..., -1:]
    return (cumulative <= reached).sum(dim=-1).clamp(max=logits.shape[-1] - 1)


def keyed_uniform(keys: np.ndarray, shape: Sequence[int]) -> Tensor:
    """Return (B, *shape) float64 in [0, 1); row i is a function of ``keys[i]`` alone.

    So an episode's draws do not depend on which other environments were ready with it.

    Args:
        keys: (B, k) non-negative integers.
        shape: Of one row.
    """
    rows = [np.random.default_rng(key.tolist()).random(tuple(shape)) for key in keys]
    return torch.from_numpy(np.stack(rows) if rows else np.empty((0, *shape)))


def keyed_normal(keys: np.ndarray, shape: Sequence[int]) -> Tensor:
    """Return (B, *shape) standard normal float64; row i is a function of ``keys[i]`` alone."""
    rows = [np.random.default_rng(key.tolist()).standard_normal(tuple(shape)) for key in keys]
    return torch.from_numpy(np.stack(rows) if rows else np.empty((0, *shape)))
