"""The one check of an action that somebody hands in."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_gym.errors import InvalidActionError


def as_action(action: Any, shape: tuple[int | None, ...] | None) -> np.ndarray:
    """Return an action as a contiguous float64 array.

    Args:
        action: What the caller gave.
        shape: That it must have, with None for any number of rows from 1; None: any shape, and
            numbers that are not finite too.

    Raises:
        InvalidActionError: If it has another shape, or holds other things than finite real numbers.
    """
    try:
        array = np.asarray(action)
    # A tensor on a GPU, or with a gradient; rows of several lengths.
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0, object)
    if array.dtype.kind not in "fiub":
        raise InvalidActionError(
            f"Expected an action of real numbers, got {type(action).__name__} of {array.dtype}."
        )
    array = np.asarray(array, np.float64, order="C")
    if shape is not None:
        if array.ndim != len(shape) or not all(
            n == m if m is not None else n >= 1 for n, m in zip(array.shape, shape, strict=True)
        ):
            wanted = f"{shape} with C >= 1".replace("None", "C") if None in shape else shape
            raise InvalidActionError(f"Expected an action of shape {wanted}, got {array.shape}.")
        if not np.isfinite(array).all():
            raise InvalidActionError(
                f"An action must be finite, got {array.tolist()}. Nothing was executed; check the "
                "policy for exploding weights or a wrong un-normalisation."
            )
    return array
