"""Terms that a wrapper made a reward of: ``info["reward_terms"]``, as the trainers log them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


class RewardTerms:
    """Adds up terms by name.

    Attributes:
        sums: Sum of each term's values.
        counts: How many they are.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def extend(self, terms: Iterable[Mapping[str, float]]) -> None:
        """Take in the terms of some chunks."""
        for chunk in terms:
            for name, value in chunk.items():
                if not math.isfinite(value):  # of a chunk that nothing is learned from
                    continue
                self.sums[name] = self.sums.get(name, 0.0) + float(value)
                self.counts[name] = self.counts.get(name, 0) + 1


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
