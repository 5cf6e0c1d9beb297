"""Pure functions of the RL token's training."""

from __future__ import annotations

import torch


def reconstruction_loss(
    predicted: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean squared error with stop-gradient targets, sum_m mask_m |p_m - sg(h_m)|^2 / (n H).

    Args:
        predicted: (B, M, H) reconstruction.
        hidden: (B, M, H) target; no gradient flows into it.
        mask: (B, M) bool, True for real tokens; None if all are.

    Returns:
        Scalar: mean over the n real tokens and the H dimensions.
    """
    error = (predicted - hidden.detach()).square().mean(dim=-1)
    if mask is None:
        return error.mean()
    weight = mask.to(error.dtype)
    return (error * weight).sum() / weight.sum().clamp(min=1.0)


def explained_variance(
    predicted: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor | None = None
) -> float:
    """Return 1 - sum |p - h|^2 / sum |h - mean(h)|^2, mean over the batch per token and dim.

    1 is perfect, 0 what the constant mean state reaches.

    Args:
        predicted: (B, M, H) reconstruction.
        hidden: (B, M, H) target.
        mask: (B, M) bool, True for real tokens; None if all are.
    """
    weight = hidden.new_ones(hidden.shape[:2]) if mask is None else mask.to(hidden.dtype)
    weight = weight[..., None]
    mean = (hidden * weight).sum(0) / weight.sum(0).clamp(min=1.0)
    residual = ((predicted - hidden).square() * weight).sum()
    total = ((hidden - mean).square() * weight).sum()
    return float(1.0 - residual / total.clamp(min=1e-12))
