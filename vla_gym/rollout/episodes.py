"""Where an episode begins, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vla_gym.suites import get_task


class Start(NamedTuple):
    """Where an episode begins; sorts into the order in which episodes are listed.

    Attributes:
        suite: Suite name.
        task_id: Task in the suite.
        init_state_id: Official state, from 0; -1 for a layout sampled with ``seed``.
        seed: Decides the layout, and how the scene varies if it does. With an official state and
            no variation nothing depends on it.
    """

    suite: str
    task_id: int
    init_state_id: int = -1
    seed: int = 0

    @classmethod
    def official(cls, suite: str, task_id: int, state: int, look: int | None = None) -> Start:
        """Return the start on an official state, from 0.

        ``look``: how many states in a row share a look; None where scenes do not vary.
        """
        return cls(suite, task_id, state, 0 if look is None else state // look)

    @classmethod
    def number(
        cls, k: int, suite: str, task_id: int, look: int | None, first_seed: int | None
    ) -> Start:
        """Return start number ``k``, from 0, of a task in an evaluation.

        It is on official state k, see :meth:`official`, or, if ``first_seed`` is given, on the
        layout of seed ``first_seed + k``.
        """
        if first_seed is not None:
            return cls(suite, task_id, seed=first_seed + k)
        return cls.official(suite, task_id, k, look)

    def __str__(self) -> str:
        """Return what messages call it."""
        is_sampled = self.init_state_id < 0
        where = f"seed {self.seed}" if is_sampled else f"state {self.init_state_id}"
        return f"{self.suite} {self.task_id} {where}"

    def label(self) -> str:
        """Return what captions call it: a file of one's own by its name, not by its digest."""
        file = get_task(self.suite, self.task_id).facts.get("bddl_file")
        return f"{file} seed {self.seed}" if file else str(self)


def sampled_starts(suite: str, task_ids: Sequence[int], count: int, seed: int) -> list[Start]:
    """Return ``count`` sampled layouts of each task, a function of the arguments alone.

    Layout k of a task has the seed ``seed + k``, also in other tasks: their scenes differ.
    """
    tasks = sorted(set(task_ids))
    return [Start(suite, task, -1, seed + k) for task in tasks for k in range(count)]


@dataclass(frozen=True)
class Episode:
    """One episode that was played to its end.

    Attributes:
        start: Where it began.
        success: The goal was reached.
        terminated: It ended because of that.
        truncated: It ended at the step limit.
        length: Control steps executed.
        achieved: Where goals were watched: the task whose goal was the first to become true, of
            all tasks of the suite that share the scene; None: no goal did. Goals that held when
            the episode began do not count.
        achieved_step: Control step at which it did.
        replays: Times that the episode was begun again because its worker had died.
    """

    start: Start
    success: bool
    terminated: bool
    truncated: bool
    length: int
    achieved: int | None = None
    achieved_step: int | None = None
    replays: int = 0

    @property
    def suite(self) -> str:
        """Suite name."""
        return self.start.suite

    @property
    def task_id(self) -> int:
        """Task in the suite."""
        return self.start.task_id

    @property
    def init_state_id(self) -> int:
        """Official state; -1 for a sampled layout."""
        return self.start.init_state_id


def success_by_task(episodes: Iterable[Episode]) -> dict[int, float]:
    """Return the success rate of every task that was played."""
    won: dict[int, list[bool]] = {}
    for episode in episodes:
        won.setdefault(episode.task_id, []).append(episode.success)
    return {task: float(np.mean(flags)) for task, flags in sorted(won.items())}


def mean_success(episodes: Iterable[Episode]) -> float:
    """Return the mean over tasks of their success rates; 0 if nothing was played."""
    rates = list(success_by_task(episodes).values())
    return float(np.mean(rates)) if rates else 0.0
