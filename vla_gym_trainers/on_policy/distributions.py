"""Distributions over action samples, drawn so that a row's draw depends on its own key alone.

All that learning asks of a distribution is in :class:`vla_gym.vla.base.Distribution`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: Probabilities below and above which the edges of bins are not told apart, and a smallest one.
_TAIL, _TINY = 1e-13, 1e-30


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


class CorrelatedTokens(TokenDistribution):
    """Tokens whose draws move on in one direction, as :class:`GaussianChunk`'s, not tremble.

    The bins of a token share out the normal distribution N(0, 1) by their softmax probabilities.
    In the first row a token is the bin that a number from it falls into; then the number is from
    ``N(rho z, 1 - rho^2)``, z being the middle, by probability, of the bin of the row before. So a
    row by itself has about the softmax distribution still; a factor is the probability of a row's
    token given the one before it, and those of the first k rows add up to exactly the
    log-probability of these rows alone. Neighbouring bins must be neighbouring actions.
    """

    def __init__(self, logits: Tensor, temperature: float, correlation: float) -> None:
        """Take logits (B, C, 7, 256), a positive temperature and rho in (0, 1)."""
        super().__init__(logits, temperature)
        self.correlation, self._fresh = correlation, math.sqrt(1.0 - correlation**2)
        self._p = (logits.double() / temperature).softmax(dim=-1)
        self._reached = self._p.cumsum(dim=-1)

    def draw(self, keys: np.ndarray) -> Tensor:
        """Draw tokens (B, C, 7) int64."""
        noise = keyed_normal(keys, self.logits.shape[1:-1]).to(self._p)
        rows: list[Tensor] = []
        middle = torch.zeros_like(noise[:, 0])
        for k in range(noise.shape[1]):
            z = self.correlation * middle + self._fresh * noise[:, k] if k else noise[:, 0]
            row = (self._reached[:, k] <= torch.special.ndtr(z)[..., None]).sum(dim=-1)
            rows.append(row.clamp(max=self._p.shape[-1] - 1))
            middle = self._bins(rows[-1][:, None], slice(k, k + 1))[1][:, 0]
        return torch.stack(rows, dim=1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """Return the log-probabilities (B, C, 7) of tokens, given those of the row before."""
        low, middle, high = self._bins(sample)
        before = self.correlation * middle[:, :-1]
        low, high = ((edge[:, 1:] - before) / self._fresh for edge in (low, high))
        # In the upper half from the other side, where the difference is not rounded away.
        side = torch.where(low > 0.0, -1.0, 1.0)
        p = (torch.special.ndtr(side * high) - torch.special.ndtr(side * low)).abs()
        first = super().log_prob(sample)[:, :1]
        return torch.cat([first, p.clamp(min=_TINY).log().float()], dim=1)

    def _bins(self, tokens: Tensor, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Return lower edge, middle and upper edge, normal numbers, of the bins of tokens."""
        index = tokens.long()[..., None]
        p, high = (x[:, rows].gather(-1, index).squeeze(-1) for x in (self._p, self._reached))
        edges = ((high - share * p).clamp(_TAIL, 1.0 - _TAIL) for share in (1.0, 0.5, 0.0))
        low, middle, high = map(torch.special.ndtri, edges)
        return low, middle, high


class GaussianChunk:
    """A normal distribution of K x N numbers; each is a factor.

    The numbers are the coefficients of K functions of time, or (K = C) the control steps of a chunk
    themselves. With a correlation rho the noise of successive rows is a stationary autoregression,
    ``e_0 = w_0``, ``e_k = rho e_{k-1} + sqrt(1 - rho^2) w_k``, so that exploration moves on in one
    direction instead of trembling. A factor is then the density of a row given those before it:
    the factors of the first k rows add up to exactly the log-density of these rows alone.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, correlation: float = 0.0) -> None:
        """Take means (B, K, N), log-standard deviations (N,) or (K, N), and rho in [0, 1)."""
        self.mean, self.log_std, self.correlation = mean, log_std, correlation

    def draw(self, keys: np.ndarray) -> Tensor:
        """Draw numbers (B, K, N) float32."""
        noise = keyed_normal(keys, self.mean.shape[1:]).to(self.mean)
        return self.mean + self.log_std.exp() * correlated(noise, self.correlation)

    def mode(self) -> Tensor:
        """Return the means."""
        return self.mean.detach()

    def log_prob(self, sample: Tensor) -> Tensor:
        """``-w^2 / 2 - log sigma - log sqrt(1 - rho^2) - log(2 pi) / 2``, (B, K, N).

        w is what was drawn, ``(e_k - rho e_{k-1}) / sqrt(1 - rho^2)`` with
        ``e = (v - mu) / sigma``; the first row has neither rho.
        """
        z = (sample - self.mean) / self.log_std.exp()
        if self.correlation:
            z = torch.cat([z[:, :1], (z[:, 1:] - self.correlation * z[:, :-1]) / self._fresh], 1)
        return -0.5 * z.square() - self._log_scale - 0.5 * math.log(2.0 * math.pi)

    def entropy(self) -> Tensor:
        """``log sigma + log sqrt(1 - rho^2) + log(2 pi e) / 2`` of each number, (B, K, N)."""
        return (self._log_scale + 0.5 * math.log(2.0 * math.pi * math.e)).expand_as(self.mean)

    @property
    def _fresh(self) -> float:
        return math.sqrt(1.0 - self.correlation**2)

    @property
    def _log_scale(self) -> Tensor:
        rows = self.mean.new_full((self.mean.shape[1], 1), math.log(self._fresh))
        rows[0] = 0.0
        return self.log_std + rows


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


def correlated(noise: Tensor, correlation: float) -> Tensor:
    """Turn white noise (B, K, N) into that of :class:`GaussianChunk`, of the same variance."""
    if correlation == 0.0:
        return noise
    rows, fresh = [noise[:, 0]], math.sqrt(1.0 - correlation**2)
    for k in range(1, noise.shape[1]):
        rows.append(correlation * rows[-1] + fresh * noise[:, k])
    return torch.stack(rows, dim=1)
