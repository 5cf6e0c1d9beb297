"""Advantages of chunks, as pure functions.

One transition is one chunk. Chunk t executed k_t control steps, so it discounts what follows by
``discounts[t] = gamma ** k_t``, and its reward is already discounted inside. Success terminates
(nothing follows), the step limit truncates (the value of the last observation follows); the two are
never merged. Tensors are [N, T]: N rows of T slots in time. A row may hold several episodes one
after another; ``valid`` is False in slots without a transition (padding, or a transition lost with
its worker).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vla_gym.errors import ConfigError


class Advantages(NamedTuple):
    """Advantages and the returns that a value function is fitted to.

    Attributes:
        advantages: [N, T] float32, 0 where not valid.
        returns: [N, T] float32, 0 where not valid.
    """

    advantages: Tensor
    returns: Tensor


class GroupAdvantages(NamedTuple):
    """One advantage for a whole episode.

    Attributes:
        advantages: [N] float32, 0 where not kept.
        keep: [N] bool: episodes to learn from.
    """

    advantages: Tensor
    keep: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gae_lambda: float,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 11-16) over chunks.

    ``delta_t = r_t + gamma^k_t (1 - terminated_t) V(s'_t) - V(s_t)``
    ``A_t     = delta_t + gamma^k_t lambda c_t A_{t+1}``
    ``G_t     = A_t + V(s_t)``

    c_t is 1 if slot t+1 goes on with the episode of slot t: a truncated chunk bootstraps from
    V(s'_t) but takes nothing from the next episode; so does the last slot. lambda is per chunk.

    Args:
        rewards: [N, T], discounted inside the chunk.
        values: [N, T] V(s_t).
        next_values: [N, T] V(s'_t) of the observation after the chunk, before any reset.
        discounts: [N, T] gamma ** k_t.
        terminated: [N, T] bool.
        truncated: [N, T] bool.
        valid: [N, T] bool.
        gae_lambda: 0 (one step) to 1 (Monte Carlo with bootstraps).

    Raises:
        ConfigError: If ``gae_lambda`` is out of range.
    """
    if not 0.0 <= gae_lambda <= 1.0:
        raise ConfigError(f"gae_lambda must be in [0, 1], got {gae_lambda}.")
    targets = rewards + discounts * torch.where(terminated, 0.0, next_values)
    delta = torch.where(valid, targets - values, 0.0)
    weight = gae_lambda * discounts * _goes_on(terminated, truncated, valid)
    advantages = _accumulate(delta, weight)
    return Advantages(advantages, torch.where(valid, advantages + values, 0.0))


def monte_carlo_returns(
    rewards: Tensor,
    discounts: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    next_values: Tensor | None = None,
) -> Tensor:
    """Discounted returns, ``G_t = r_t + gamma^k_t G_{t+1}`` to the end of the episode.

    Where the data end before the episode does (truncation, the last slot), ``V(s'_t)`` stands for
    what is missing; without ``next_values`` it counts as 0.

    Args:
        rewards: [N, T].
        discounts: [N, T] gamma ** k_t.
        terminated: [N, T] bool.
        truncated: [N, T] bool.
        valid: [N, T] bool.
        next_values: [N, T], or None.

    Returns:
        [N, T], 0 where not valid.
    """
    goes_on = _goes_on(terminated, truncated, valid)
    own = rewards
    if next_values is not None:
        own = own + discounts * torch.where(terminated | goes_on, 0.0, next_values)
    return _accumulate(torch.where(valid, own, 0.0), discounts * goes_on)


def group_relative(
    returns: Tensor,
    groups: Tensor,
    valid: Tensor,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """GRPO (Shao et al. 2024, section 4.1.2): each episode against its group.

    ``A_i = (R_i - mean_g R) / (std_g R + eps)`` over the valid members of its group g, with the
    standard deviation of a sample (n - 1). Groups without contrast (all returns equal, or fewer
    than two valid members) teach nothing and are dropped.

    With ``lengths`` the mean that is taken off is ``sum_g l_i R_i / sum_g l_i`` (Hao et al. 2025,
    "On-Policy RL with Optimal Reward Baseline"), so that the advantages of a group's tokens sum to
    0. Failures run to the step limit: without it most tokens have negative advantages, which
    push the policy away from all that it does.

    Args:
        returns: [N], one number an episode.
        groups: [N] int64; equal numbers played the same task from the same state.
        valid: [N] bool; episodes that are not do not count in their group either.
        lengths: [N], tokens of each episode, or None for equal weights.
        eps: See above.
    """
    returns = torch.where(valid, returns, 0.0)  # NaN of an episode that was not played
    index = groups.unique(return_inverse=True)[1]
    member = valid.to(returns.dtype)
    zeros = returns.new_zeros(int(index.max()) + 1 if len(index) else 0)
    count = zeros.index_add(0, index, member)
    mean = zeros.index_add(0, index, returns * member) / count.clamp(min=1.0)
    centred = (returns - mean[index]) * member
    variance = zeros.index_add(0, index, centred.square()) / (count - 1).clamp(min=1.0)
    if lengths is not None:
        weight = lengths.to(returns.dtype) * member
        total = zeros.index_add(0, index, weight)
        baseline = zeros.index_add(0, index, returns * weight) / total.clamp(min=1.0)
        centred = (returns - baseline[index]) * member
    # By comparison, not by the variance, whose rounding would keep groups of equal returns.
    low = torch.full_like(zeros, torch.inf).scatter_reduce(
        0, index, torch.where(valid, returns, torch.inf), "amin"
    )
    high = torch.full_like(zeros, -torch.inf).scatter_reduce(
        0, index, torch.where(valid, returns, -torch.inf), "amax"
    )
    keep = valid & (high > low)[index]
    advantages = centred / (variance.sqrt()[index] + eps)
    return GroupAdvantages(torch.where(keep, advantages, 0.0), keep)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return (3,) float64: count, sum and sum of squares where the mask is True.

    Moments of several processes may be added before :func:`standardize` uses them.
    """
    kept = values[mask].double()
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()])


def standardize(values: Tensor, mask: Tensor, sums: Tensor, eps: float = 1e-8) -> Tensor:
    """Return ``(x - mean) / (std + eps)`` where the mask is True, 0 elsewhere.

    Args:
        values: Any shape.
        mask: The same shape, bool.
        sums: From :func:`moments`.
        eps: See above; with fewer than two values the mean alone is taken off.
    """
    count, total, squares = (float(x) for x in sums)
    mean = total / max(count, 1.0)
    variance = (squares - count * mean * mean) / max(count - 1.0, 1.0)
    scale = 1.0 / (max(variance, 0.0) ** 0.5 + eps) if count > 1.0 else 1.0
    return torch.where(mask, (values - mean) * scale, 0.0)


def _goes_on(terminated: Tensor, truncated: Tensor, valid: Tensor) -> Tensor:
    """[N, T] bool: slot t+1 holds the next transition of the same episode."""
    following = torch.zeros_like(valid)
    following[:, :-1] = valid[:, 1:]
    return valid & following & ~terminated & ~truncated


def _accumulate(values: Tensor, weights: Tensor) -> Tensor:
    """``y_t = x_t + w_t y_{t+1}`` from the last slot back; [N, T]."""
    result = values.clone()
    for t in range(values.shape[1] - 2, -1, -1):
        result[:, t] += weights[:, t] * result[:, t + 1]
    return result
