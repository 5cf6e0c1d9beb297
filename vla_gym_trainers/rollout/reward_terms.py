"""Terms that a wrapper made a reward of: ``info["reward_terms"]``, as the trainers log them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def reward_metrics(terms: Mapping[str, float]) -> dict[str, float]:
    """Return a chunk's terms by the names of their metrics, ``rollout/reward_<term>``.

    But for those that are not finite: nothing is learned from their chunk.
    """
    finite = {name: float(value) for name, value in terms.items() if math.isfinite(value)}
    return {f"rollout/reward_{name}": value for name, value in finite.items()}


def add_terms(info: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Add the terms of an info of the same chunk, if there are any, to those of ``info``."""
    if "reward_terms" in before:
        both = before["reward_terms"], info.get("reward_terms", {})
        names = dict.fromkeys([*both[0], *both[1]])
        info["reward_terms"] = {n: sum(part.get(n, 0.0) for part in both) for n in names}
