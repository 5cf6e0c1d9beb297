"""Losses of TD3+BC on RL tokens, as pure functions of tensors.

Notation (RL Token, arXiv 2604.23073): state ``x = (z_rl, proprio)``, action chunk
``a`` = C actions of 7 numbers, reference chunk ``a~`` of the frozen VLA, actor
``pi(a | x, a~) = N(mu(x, a~), sigma^2 I)``, critics ``Q_1 .. Q_n``. Shapes: B is the batch size,
A = C * 7 the flattened chunk, n the number of critics. All tensors are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Floor ``q_min`` of what the actor's Q is divided by.
MIN_Q_SCALE = 0.02


def smoothed_target_action(target_mean: Tensor, noise: Tensor, noise_clip: Tensor) -> Tensor:
    """Return the target policy's action with clipped smoothing noise.

    ``a' = clip(mu'(x', a~') + clip(eps, -c, c), -1, 1)`` (target policy smoothing of TD3).

    Args:
        target_mean: (B, A) output of the target actor.
        noise: (B, A) noise ``eps``, already scaled.
        noise_clip: (A,) bound ``c`` on the absolute value of the noise.

    Returns:
        (B, A) actions in [-1, 1].
    """
    return (target_mean + torch.clamp(noise, -noise_clip, noise_clip)).clamp(-1.0, 1.0)


def td3_target(
    rewards: Tensor,
    terminations: Tensor,
    discounts: Tensor,
    next_q: Tensor,
    mc_returns: Tensor | None = None,
    mc_weight: float = 0.0,
    value_range: tuple[float, float] | None = (0.0, 1.0),
) -> Tensor:
    """Return the critics' regression target for chunked transitions.

    ``y_td = r + (1 - terminated) * gamma**k * min_i Q'_i(x', a')`` where ``k`` is the number of
    control steps that the chunk really executed, so ``discounts = gamma**k`` differs from row to
    row. A truncated transition (time limit) is not terminal and bootstraps like any other.
    ``y = (1 - w) * clip(y_td) + w * G`` mixes in the Monte-Carlo return ``G`` where it is known;
    rows whose episode has not ended hold NaN there and use ``y_td`` alone.

    Args:
        rewards: (B,) discounted sum of the rewards inside the chunk.
        terminations: (B,) 1.0 where the episode ended by success, else 0.0.
        discounts: (B,) ``gamma ** executed_steps``.
        next_q: (B, n) target critics at the next state and target action.
        mc_returns: (B,) Monte-Carlo returns, NaN where unknown; None means none is known.
        mc_weight: Weight ``w`` of the Monte-Carlo return in [0, 1].
        value_range: Reachable returns (lowest, highest) that targets are clamped to: (0, 1) for a
            reward of 1 on success. None disables the clamp.

    Returns:
        (B,) targets, without gradient.
    """
    target = rewards + (1.0 - terminations) * discounts * next_q.min(dim=1).values
    if value_range is not None:
        target = target.clamp(*value_range)
    if mc_returns is not None and mc_weight > 0.0:
        mixed = (1.0 - mc_weight) * target + mc_weight * mc_returns
        target = torch.where(torch.isnan(mc_returns), target, mixed)
    return target.detach()


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return the sum over the critics of the mean squared error to one shared target.

    ``L_Q = sum_i mean_b (Q_i(x_b, a_b) - y_b)^2``.

    Args:
        q: (B, n) critics at the executed action.
        target: (B,) targets of :func:`td3_target`.

    Returns:
        Scalar.
    """
    return ((q - target[:, None]) ** 2).mean(dim=0).sum()


def reference_distance(actions: Tensor, reference: Tensor, scale: Tensor) -> Tensor:
    """Return the squared distance of a chunk to the reference in scaled action units.

    ``d_b = sum_j ((a_bj - a~_bj) / scale_j)^2``: a sum over the chunk, not a mean, so that the
    weight means the same per dimension whatever the chunk length.

    Args:
        actions: (B, A) chunks.
        reference: (B, A) chunks of the VLA.
        scale: (A,) natural size of each action dimension.

    Returns:
        (B,) distances.
    """
    return (((actions - reference) / scale) ** 2).sum(dim=1)


def pessimistic_value(q: Tensor, q_reference: Tensor, pessimism: float) -> Tensor:
    """Return what the actor climbs: less where the critics disagree about leaving the VLA.

    ``mean_i Q_i(x, a) - kappa std_i (Q_i(x, a) - Q_i(x, a~))``, the standard deviation over the
    critics (no Bessel correction). At a = a~ it is the mean: only the advantage over the VLA is
    doubted, not the value of the state, on which critics differ anyway.

    Args:
        q: (B, n) values of the actor's chunk, with gradient to the actor.
        q_reference: (B, n) values of the VLA's chunk.
        pessimism: ``kappa`` >= 0.

    Returns:
        (B,) values.
    """
    spread = (q - q_reference).var(dim=1, correction=0)
    return q.mean(dim=1) - pessimism * (spread + 1e-10).sqrt()  # finite gradient at a = a~


def q_divisor(q: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return what each row's value is divided by, ``max(mean_b |Q_b|, q_min)``.

    With several tasks each has a divisor of its own, the mean over its rows: by a common one, a
    task of seldom success would be held to the VLA many times as firmly as the others.

    Args:
        q: (B,) critic values; no gradient flows through the divisor.
        groups: (B,) int64 task of each row, over whose rows alone the mean is; None: one task.

    Returns:
        (B,) positive numbers.
    """
    sizes = q.detach().abs()
    if groups is None:
        means = sizes.mean().expand(len(sizes))
    else:
        # No shape depends on the content, so this can be part of a CUDA graph.
        same = (groups[:, None] == groups).float()
        means = (same @ sizes) / same.sum(dim=1)
    return means.clamp(min=MIN_Q_SCALE)


def actor_loss(
    q: Tensor,
    actions: Tensor,
    reference: Tensor,
    scale: Tensor,
    bc_weight: float | Tensor,
    divisor: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the actor's loss: climb Q, stay near the reference.

    ``L_pi = -mean_b [Q(x_b, a_b) / max(mean_b |Q(x_b, a_b)|, q_min)]``
    ``       + mean_b [beta_b ||a_b - a~_b||^2]``
    with ``a = mu(x, a~)``. The division (as in TD3+BC) makes ``beta`` independent of the size of Q;
    its floor keeps a task without any success yet from being pure amplified noise.

    Args:
        q: (B,) critic value of the actor's own chunk, with gradient to the actor.
        actions: (B, A) the actor's chunks.
        reference: (B, A) the VLA's chunks, or what was demonstrated.
        scale: (A,) natural size of each action dimension (see :func:`reference_distance`).
        bc_weight: ``beta`` >= 0, one for all rows or (B,).
        divisor: (B,) of these rows, as :func:`q_divisor` gives it for the whole batch.

    Returns:
        The loss, a scalar, and the mean over the batch of the squared scaled distance.
    """
    distance = reference_distance(actions, reference, scale)
    held = (bc_weight * distance).mean()
    return held - (q / divisor).mean(), distance.mean().detach()
