"""Outcomes of the training episodes: rates, by task, and the worst stretch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: Episodes of the window whose lowest success rate is reported.
WINDOW = 1000

Outcomes = list[tuple[int, bool]]


def counts(info: Mapping[str, Any]) -> bool:
    """Tell whether an ended episode is one of the task: whole, and from its start."""
    return not (info.get("worker_restarted", False) or "demo_steps" in info)


class EpisodeLog:
    """(task id, success) of every training episode, those of the warm-up apart.

    Attributes:
        warmup: Episodes of the VLA with exploration noise.
        trained: Episodes of the learned policy with exploration noise.
    """

    def __init__(self) -> None:
        self.warmup: Outcomes = []
        self.trained: Outcomes = []

    def add(self, task_id: int, success: bool, is_warm_up: bool) -> None:
        """Take one episode in."""
        (self.warmup if is_warm_up else self.trained).append((task_id, success))

    @property
    def total(self) -> int:
        """Episodes so far."""
        return len(self.warmup) + len(self.trained)

    def recent_success(self) -> float | None:
        """Return the success rate of the newest 50 episodes; None before the first one."""
        return _rate(_wins([*self.warmup[-50:], *self.trained[-50:]][-50:]))

    def summary(self) -> dict[str, Any]:
        """Return the figures of the result card; docs/metrics.md has their formulas."""
        return {
            "warmup_episodes": len(self.warmup),
            "warmup_success": _rate(_wins(self.warmup)),
            "episodes": len(self.trained),
            "success_by_100_episodes": _blocks(_wins(self.trained), 100),
            "lowest_success_1000": lowest_window(_wins(self.trained), WINDOW),
            "success_by_task": {
                str(task_id): {
                    "warmup_episodes": len(warmup),
                    "warmup_success": _rate(warmup),
                    "by_50_episodes": _blocks(trained, 50),
                }
                for task_id, (warmup, trained) in sorted(self._by_task().items())
            },
        }

    def _by_task(self) -> dict[int, tuple[list[bool], list[bool]]]:
        tasks: dict[int, tuple[list[bool], list[bool]]] = defaultdict(lambda: ([], []))
        for part, episodes in enumerate((self.warmup, self.trained)):
            for task_id, success in episodes:
                tasks[task_id][part].append(success)
        return tasks


def lowest_window(successes: Sequence[bool], width: int) -> float | None:
    """Return the lowest success rate of any ``width`` successive episodes; None if too few."""
    if len(successes) < width:
        return None
    total = np.concatenate([[0], np.cumsum(successes)])
    return float(np.min(total[width:] - total[:-width]) / width)


def _wins(episodes: Outcomes) -> list[bool]:
    return [success for _, success in episodes]


def _rate(successes: Sequence[bool]) -> float | None:
    return float(np.mean(successes)) if len(successes) else None


def _blocks(successes: Sequence[bool], size: int) -> list[float]:
    starts = range(0, len(successes), size)
    return [float(np.mean(successes[start : start + size])) for start in starts]
