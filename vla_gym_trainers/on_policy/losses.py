"""Losses on action samples, as pure functions.

A minibatch has B chunks; the sample of each has factors (``F`` below: C x 7 tokens, K x 7 numbers)
with a log-probability of their own. ``mask`` (B, *F) is False for factors that took no part: those
of control steps that were never executed, after success, after the step limit, or beyond the
executed part of the chunk. Each loss is a SUM over what it is given divided by ``count``, the
number of factors (or chunks) in the whole minibatch: losses of micro-batches, and of processes, add
up to that of the minibatch exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.config import RatioLevel


class Ratio(NamedTuple):
    """Log-ratios of the policy to the behaviour policy, and which of them count.

    Attributes:
        log_ratio: (B, *F) at level ``"factor"``, (B,) at level ``"chunk"``.
        mask: The same shape, bool.
    """

    log_ratio: Tensor
    mask: Tensor


class PolicyLoss(NamedTuple):
    """The loss and what to know about it; ``clipped`` and ``kl`` are sums, to be divided later.

    Attributes:
        loss: Scalar with gradient.
        clipped: Number of ratios whose gradient the clip has cut off.
        kl: Sum of the estimates of KL(behaviour || policy).
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def ratio_of(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    level: RatioLevel = "factor",
    clamp: float = 10.0,
) -> Ratio:
    """``log r = log pi(a|s) - log pi_old(a|s)``, of each factor or summed over a chunk's.

    Beyond +-``clamp`` it is cut (with its gradient), so that exp() stays finite.

    Args:
        log_probs: (B, *F), with gradient.
        old_log_probs: (B, *F), of the policy that acted, at the same temperature.
        mask: (B, *F) bool.
        level: ``"factor"`` (SimpleVLA-RL, RLinf's OFT) or ``"chunk"``: one ratio a chunk.
        clamp: See above.

    Raises:
        ConfigError: If the level is unknown.
    """
    difference = torch.where(mask, log_probs - old_log_probs, 0.0)
    if level == "factor":
        return Ratio(difference.clamp(-clamp, clamp), mask)
    if level == "chunk":
        summed = difference.sum(dim=tuple(range(1, difference.ndim)))
        return Ratio(summed.clamp(-clamp, clamp), mask.flatten(1).any(dim=1))
    raise ConfigError(f"Expected ratio level 'factor' or 'chunk', got {level!r}.")


def ppo_loss(
    ratio: Ratio,
    advantages: Tensor,
    count: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with DAPO's asymmetric range.

    ``L = -1/count sum_i min(r_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) A_i)``

    Args:
        ratio: From :func:`ratio_of`.
        advantages: (B,), one a chunk, shared by its factors.
        count: Of ratios in the whole minibatch.
        clip_low: 0.2 in PPO.
        clip_high: 0.2 in PPO, 0.28 in DAPO: rare samples may grow further.
    """
    log_ratio, mask = ratio
    advantages = advantages.reshape(-1, *(1,) * (log_ratio.ndim - 1)).expand_as(log_ratio)
    r = log_ratio.exp()
    free, bounded = r * advantages, r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -torch.where(mask, torch.minimum(free, bounded), 0.0).sum() / count
    with torch.no_grad():
        clipped = (mask & (bounded < free)).sum()
        kl = torch.where(mask, r - 1.0 - log_ratio, 0.0).sum()
    return PolicyLoss(loss, clipped, kl)


def reference_kl(
    log_probs: Tensor, reference: Tensor, mask: Tensor, count: float, clamp: float = 10.0
) -> Tensor:
    """KL(policy || frozen reference) by Schulman's k3 estimator, as in GRPO's eq. 4.

    ``d = log pi_ref(a|s) - log pi(a|s)``, ``KL = 1/count sum (exp(d) - d - 1)``: never negative,
    and without bias for samples that the policy itself drew.

    Args:
        log_probs: (B, *F), with gradient.
        reference: (B, *F).
        mask: (B, *F) bool.
        count: Of factors in the whole minibatch.
        clamp: d is cut beyond +- this.
    """
    d = torch.where(mask, reference - log_probs, 0.0).clamp(-clamp, clamp)
    return torch.where(mask, d.exp() - d - 1.0, 0.0).sum() / count


def masked_mean(values: Tensor, mask: Tensor, count: float) -> Tensor:
    """``1/count sum_{mask} values``."""
    return torch.where(mask, values, 0.0).sum() / count


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, count: float, clip: float | None = 0.2
) -> Tensor:
    """Squared error of the values, clipped as in PPO's reference implementation.

    ``L = 1/(2 count) sum max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2)``

    Args:
        values: (B,), with gradient.
        old_values: (B,), when the data were collected.
        returns: (B,).
        count: Of chunks in the whole minibatch.
        clip: None for no clipping.
    """
    error = (values - returns).square()
    if clip is not None:
        moved = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (moved - returns).square())
    return 0.5 * error.sum() / count


def cloning_loss(log_probs: Tensor, mask: Tensor, count: float) -> Tensor:
    """Cross-entropy to a teacher's samples, ``-1/count sum_{mask} log pi(a_teacher|s)``.

    Args:
        log_probs: (B, *F) of the teacher's samples, with gradient.
        mask: (B, *F) bool.
        count: Of factors in the whole minibatch.
    """
    return -masked_mean(log_probs, mask, count)
