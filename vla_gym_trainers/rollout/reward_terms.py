"""Terms that a wrapper made a reward of: ``info["reward_terms"]``, as the trainers log them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

#: By name: sum of a term's values, and how many they are, float64 (2,).
RewardTerms = defaultdict[str, np.ndarray]


def no_terms() -> RewardTerms:
    """Return sums of nothing."""
    return defaultdict(lambda: np.zeros(2))


def add_up(sums: RewardTerms, terms: Mapping[str, float]) -> None:
    """Add a chunk's terms, but for those that are not finite: nothing is learned from its chunk."""
    for name, value in terms.items():
        if math.isfinite(value):
            sums[name] += (value, 1)


def reward_metrics(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the finite terms by the names of their metrics, ``rollout/reward_<term>``."""
    finite = {name: float(value) for name, value in terms.items() if math.isfinite(value)}
    return {f"rollout/reward_{name}": value for name, value in finite.items()}


def add_terms(info: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Add the terms of an info of the same chunk, if there are any, to those of ``info``."""
    if "reward_terms" in before:
        both = before["reward_terms"], info.get("reward_terms", {})
        names = dict.fromkeys([*both[0], *both[1]])
        info["reward_terms"] = {n: sum(part.get(n, 0.0) for part in both) for n in names}
