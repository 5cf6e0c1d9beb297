"""Pure functions of the RL token's training."""

from __future__ import annotations

import torch


def reconstruction_loss(predicted: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Mean squared error with stop-gradient targets, sum_m |p_m - sg(h_m)|^2 / (M H).

    Args:
        predicted: (B, M, H) reconstruction.
        hidden: (B, M, H) target; no gradient flows into it.

    Returns:
        Scalar: mean over the batch, the M tokens and the H dimensions.
    """
    return (predicted - hidden.detach()).square().mean(dim=-1).mean()


def explained_variance(predicted: torch.Tensor, hidden: torch.Tensor) -> float:
    """Return 1 - sum |p - h|^2 / sum |h - mean(h)|^2, mean over the batch per token and dim.

    1 is perfect, 0 what the constant mean state reaches.

    Args:
        predicted: (B, M, H) reconstruction.
        hidden: (B, M, H) target.
    """
    residual = (predicted - hidden).square().sum()
    total = (hidden - hidden.mean(0)).square().sum()
    return float(1.0 - residual / total.clamp(min=1e-12))
