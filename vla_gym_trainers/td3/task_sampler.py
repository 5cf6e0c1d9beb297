"""How often each task is played: by how much there is to learn from its next episode."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

#: Newest episodes of a task that say how often it is solved.
WINDOW = 30
#: What a task's weight would be at least if its success were known for sure; of a whole window it
#: is 0.21, beside 1 of a task that is solved every other time.
FLOOR = 0.1


class TaskSampler:
    """Weighs tasks by their learnability ``p (1 - p)`` (arXiv 2408.15099).

    ``p = (wins + 1) / (n + 2)`` of the newest :data:`WINDOW` training episodes of a task, those of
    the warm-up and those that began inside a demonstration included; its weight is
    ``f + (1 - f) 4 p (1 - p)`` with ``f`` = :data:`FLOOR`. A task that is never or always solved
    teaches little, but is still played: the one may begin to succeed, the other be forgotten.
    Before its first episode a task has the weight 1.
    """

    def __init__(self) -> None:
        """Begin with no episodes."""
        self._successes: defaultdict[int, deque[bool]] = defaultdict(partial(deque, maxlen=WINDOW))

    def add(
        self, task_ids: np.ndarray, dones: np.ndarray, infos: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take in a chunk of each environment; those that a dead worker cut off do not count.

        Args:
            task_ids: (N,) or (N, 1) tasks that were played.
            dones: (N,) bool: the episode has ended.
            infos: N dicts, with ``is_success`` where it has.
        """
        for i in np.flatnonzero(dones).tolist():
            if not infos[i].get("worker_restarted", False):
                self._successes[int(task_ids.flat[i])].append(bool(infos[i]["is_success"]))

    def weights(self) -> dict[int, float]:
        """Return the weights, in (0, 1], of the tasks that have been played."""
        rates = {t: (sum(w) + 1) / (len(w) + 2) for t, w in self._successes.items()}
        return {t: FLOOR + (1 - FLOOR) * 4 * p * (1 - p) for t, p in rates.items()}
