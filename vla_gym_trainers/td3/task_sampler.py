"""How often each task is played and drawn: less where it is solved."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError

#: Newest episodes of a task that say how often it is solved.
WINDOW = 30
#: What a task's weight would be if it were always solved for sure; after a whole window of
#: successes it is 0.21, beside 1 of a task that is solved at most every other time.
FLOOR = 0.1


class TaskSampler:
    """Weighs tasks by what is left to learn.

    ``p = (wins + 1) / (n + 2)`` of the newest :data:`WINDOW` training episodes of a task, those of
    the warm-up included; its weight is ``f + (1 - f) 4 q (1 - q)`` with ``q = max(p, 1/2)`` and
    ``f`` = :data:`FLOOR`: above a half the learnability of arXiv 2408.15099, and below it 1, since
    a task that is hardly ever solved needs more episodes, not fewer. One that is always solved is
    still played: it may be forgotten. A task whose episodes begin inside demonstrations too has
    the sum of the weights of either kind. Before its first episode a task has the weight 1.
    """

    def __init__(self) -> None:
        #: By task, and whether episodes began inside a demonstration.
        self._successes: defaultdict[tuple[int, bool], deque[bool]] = defaultdict(
            partial(deque, maxlen=WINDOW)
        )

    def add(
        self, task_ids: np.ndarray, dones: np.ndarray, infos: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take in a chunk of each environment; those that a dead worker cut off do not count.

        Args:
            task_ids: (N,) or (N, 1) tasks that were played.
            dones: (N,) bool: the episode has ended.
            infos: N dicts, with ``is_success`` where it has, and ``demo_steps`` where it began
                inside a demonstration.

        Raises:
            ConfigError: If the environments do not tell ``is_success``.
        """
        for i in np.flatnonzero(dones).tolist():
            info = infos[i]
            if info.get("worker_restarted", False):
                continue
            if "is_success" not in info:
                raise ConfigError(
                    "task_sampling 'unsolved' needs infos with is_success where an episode ends, "
                    f"got {', '.join(sorted(info))}: add it to the environments, or leave "
                    "task_sampling out."
                )
            kind = int(task_ids.flat[i]), "demo_steps" in info
            self._successes[kind].append(bool(info["is_success"]))

    def weights(self) -> dict[int, float]:
        """Return the weights, in (0, 2], of the tasks that have been played."""
        weights: defaultdict[int, float] = defaultdict(float)
        for (task_id, _), newest in self._successes.items():
            q = max(0.5, (sum(newest) + 1) / (len(newest) + 2))
            weights[task_id] += FLOOR + (1 - FLOOR) * 4 * q * (1 - q)
        return dict(weights)
