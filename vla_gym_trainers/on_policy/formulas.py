"""The formulas of PPO and GRPO, as pure functions: advantages, then losses.

Advantages are [N, T]: N rows of T slots in time. One transition is one chunk. Chunk t executed k_t
control steps, so it discounts what follows by ``discounts[t] = gamma ** k_t``, and its reward is
already discounted inside. Success terminates (nothing follows), the step limit truncates (the
value of the last observation follows); the two are never merged. A row may hold several episodes
one after another; ``valid`` is False in slots without a transition (padding, or a transition lost
with its worker).

Losses are over B chunks. The sample of each has factors (``F`` below: C x 7 tokens, K x 7 numbers)
with a log-probability of their own. ``mask`` (B, *F) is False for factors that took no part: those
of control steps that were never executed. Each loss is a SUM over what it is given divided by
``count``, the number of factors (or chunks) in the whole minibatch: losses of micro-batches, and of
processes, add up to that of the minibatch exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vla_gym_trainers.on_policy.config import RatioLevel

# Advantages


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 11-16) over chunks.

    ``delta_t = r_t + gamma^k_t (1 - terminated_t) V(s'_t) - V(s_t)``
    ``A_t     = delta_t + gamma^k_t lambda c_t A_{t+1}``
    ``G_t     = A_t + V(s_t)``

    c_t is 1 if slot t+1 goes on with the episode of slot t: a truncated chunk bootstraps from
    V(s'_t) but takes nothing from the next episode; so does the last slot. lambda is per chunk.
    With lambda 1 and no values G is the discounted return.

    All are [N, T], but for ``gae_lambda``, from 0 (one step) to 1 (Monte Carlo with bootstraps).
    ``next_values`` are V(s'_t) of the observation after the chunk, before any reset.

    Returns:
        Advantages A and returns G, [N, T], 0 where not valid.
    """
    targets = rewards + discounts * torch.where(terminated, 0.0, next_values)
    advantages = torch.where(valid, targets - values, 0.0)
    follows = torch.zeros_like(valid)
    follows[:, :-1] = valid[:, 1:]
    goes_on = valid & follows & ~terminated & ~truncated
    weight = gae_lambda * discounts * goes_on
    for t in range(advantages.shape[1] - 2, -1, -1):
        advantages[:, t] += weight[:, t] * advantages[:, t + 1]
    return advantages, torch.where(valid, advantages + values, 0.0)


def group_relative(
    returns: Tensor,
    groups: Tensor,
    valid: Tensor,
    *,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GRPO (Shao et al. 2024, section 4.1.2): each episode against its group.

    ``A_i = (R_i - mean_g R) / (std_g R + 1e-6)`` over the valid members of its group g, with the
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

    Returns:
        Advantages [N], 0 where an episode is not learnt from, and [N] bool: where it is.
    """
    advantages, keep = torch.zeros_like(returns), torch.zeros_like(valid)
    for group in groups[valid].unique():
        members = valid & (groups == group)
        mine = returns[members]
        # By comparison, not by the deviation, whose rounding would keep groups of equal returns.
        if not mine.max() > mine.min():
            continue
        # Python's sums, one after the other: torch's round otherwise in larger groups.
        centred = mine - sum(mine) / len(mine)
        std = (sum(centred.square()) / (len(mine) - 1)) ** 0.5
        if lengths is not None:
            weight = lengths[members].to(mine.dtype)
            centred = mine - sum(mine * weight) / max(float(sum(weight)), 1.0)
        advantages[members], keep[members] = centred / (std + 1e-6), True
    return advantages, keep


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return (3,) float64: count, sum and sum of squares where the mask is True.

    Moments of several processes may be added before :func:`standardize` uses them.
    """
    kept = values[mask].double()
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()])


def standardize(values: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """Return ``(x - mean) / (std + 1e-8)`` where the mask is True, 0 elsewhere.

    ``sums`` are from :func:`moments`; with fewer than two values the mean alone is taken off.
    """
    count, total, squares = (float(x) for x in sums)
    mean = total / max(count, 1.0)
    variance = (squares - count * mean * mean) / max(count - 1.0, 1.0)
    scale = 1.0 / (max(variance, 0.0) ** 0.5 + 1e-8) if count > 1.0 else 1.0
    return torch.where(mask, (values - mean) * scale, 0.0)


# Losses


class PolicyLoss(NamedTuple):
    """The loss, with its gradient, and sums over its ratios, to be divided later.

    Attributes:
        loss: Scalar with gradient.
        clipped: Number of ratios whose gradient the clip has cut off.
        kl: Sum of ``r - 1 - log r``, estimates of KL(behaviour || policy).
        deviation: Sum of the absolute ``r - 1``.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    deviation: Tensor


def ratio_of(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    level: RatioLevel = "factor",
    clamp: float = 10.0,
) -> tuple[Tensor, Tensor]:
    """``log r = log pi(a|s) - log pi_old(a|s)``, of each factor or of a chunk's together.

    Beyond +-``clamp`` it is cut (with its gradient), so that exp() stays finite.

    Args:
        log_probs: (B, *F), with gradient.
        old_log_probs: (B, *F), of the policy that acted, at the same temperature.
        mask: (B, *F) bool.
        level: ``"factor"`` (SimpleVLA-RL, RLinf's OFT); ``"chunk"``: one ratio a chunk, of the sum
            over its factors; ``"chunk-mean"``: of their mean (as GSPO, Zheng et al. 2025, does with
            sequences), which does not grow with the chunk.
        clamp: See above.

    Returns:
        log r and which of them count, (B, *F) at level ``"factor"``, (B,) at the others.
    """
    difference = torch.where(mask, log_probs - old_log_probs, 0.0)
    if level != "factor":
        counts = mask.flatten(1).sum(dim=1)
        difference, mask = difference.flatten(1).sum(dim=1), counts > 0
        if level == "chunk-mean":
            difference = difference / counts.clamp(min=1)
    return difference.clamp(-clamp, clamp), mask


def ppo_loss(
    log_ratio: Tensor,
    mask: Tensor,
    advantages: Tensor,
    count: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with DAPO's asymmetric range.

    ``L = -1/count sum_i min(r_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) A_i)``

    Log-ratio and mask are from :func:`ratio_of`; the advantages (B,) of chunks are shared by their
    factors. PPO clips by 0.2 on both sides, DAPO above by 0.28: rare samples may grow further.
    """
    advantages = per_factor(advantages, log_ratio).expand_as(log_ratio)
    r = log_ratio.exp()
    free, bounded = r * advantages, r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -masked_mean(torch.minimum(free, bounded), mask, count)
    with torch.no_grad():
        clipped = (mask & (bounded < free)).sum()
        kl = torch.where(mask, r - 1.0 - log_ratio, 0.0).sum()
        deviation = ((r - 1.0).abs() * mask).sum()
    return PolicyLoss(loss, clipped, kl, deviation)


def reference_kl(log_probs: Tensor, reference: Tensor, mask: Tensor, count: float) -> Tensor:
    """KL(policy || frozen reference) by Schulman's k2 estimator.

    ``d = log pi(a|s) - log pi_ref(a|s)``, ``KL = 1/count sum d^2 / 2``, beyond +-10 linear in d.
    Over samples that the policy itself drew its gradient, ``d grad log pi``, is that of the KL;
    its value is about the KL only while the two policies are close.
    The gradient of GRPO's k3, ``exp(-d) + d - 1``, is that of KL(reference || policy), and one
    sample that the reference finds much likelier outweighs all others (arXiv 2510.01555). All are
    (B, *F), ``log_probs`` with gradient.
    """
    d = torch.where(mask, log_probs - reference, 0.0)
    loss = nn.functional.huber_loss(d, torch.zeros_like(d), reduction="none", delta=10.0)
    return masked_mean(loss, mask, count)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, count: float, clip: float | None = 0.2
) -> Tensor:
    """Squared error of the values (B,), clipped as in PPO's reference implementation.

    ``L = 1/(2 count) sum max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2)``

    All are (B,), ``values`` with gradient, ``old_values`` of when the data were collected; ``clip``
    None for no clipping.
    """
    error = (values - returns).square()
    if clip is not None:
        moved = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (moved - returns).square())
    return 0.5 * error.sum() / count


def masked_mean(values: Tensor, mask: Tensor, count: float) -> Tensor:
    """``1/count sum_{mask} values``; cloning is that of ``-log pi(a_teacher|s)``."""
    return torch.where(mask, values, 0.0).sum() / count


def per_factor(chunks: Tensor, factors: Tensor) -> Tensor:
    """Return (B,) with dimensions of size 1 for those of ``factors`` (B, *F)."""
    return chunks.reshape(-1, *(1,) * (factors.ndim - 1))
