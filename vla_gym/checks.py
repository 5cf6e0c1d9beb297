"""Checks of arguments that several modules share; each failure is one clear error."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError


def check_choice(value: Any, name: str, allowed: Sequence[Any]) -> None:
    """Check that an argument is one of a few values.

    Raises:
        ConfigError: If it is not.
    """
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ConfigError(f"{name} must be one of {choices}; got {value!r}.")


def as_integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    """Return an argument as an ``int``; NumPy's integers are accepted, booleans are not.

    Args:
        value: What the caller gave.
        name: What the message calls it.
        low: Smallest value allowed.
        high: Largest value allowed, or None for no bound.

    Raises:
        ConfigError: If it is not an integer, or out of range.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r}.") from None
    if high is not None and not low <= number <= high:
        raise ConfigError(f"{name} must be in {low}..{high}, got {number}.")
    if number < low:
        raise ConfigError(f"{name} must be at least {low}, got {number}.")
    return number
