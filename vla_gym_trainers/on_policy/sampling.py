"""Tokens drawn so that a row's draw depends on its own key alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


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

    So an episode's tokens do not depend on which other environments were ready with it.

    Args:
        keys: (B, k) non-negative integers.
        shape: Of one row.
    """
    rows = [np.random.default_rng(key.tolist()).random(tuple(shape)) for key in keys]
    return torch.from_numpy(np.stack(rows) if rows else np.empty((0, *shape)))
