"""What happens when a worker fails: it is started again, and what it was doing is settled."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vla_gym.errors import WorkerError, WorkerRestartWarning
from vla_gym.vector.pool import Failure, Pool
from vla_gym.vector.shared_memory import INFO_BITS, RESET, STEP
from vla_gym.vector.worker import EnvSpaces, Extras


class Restarts(ABC):
    """The part of a :class:`~vla_gym.vector.runner.Runner` that deals with failed workers.

    Attributes: see the runner, which makes them.
    """

    pool: Pool
    blocks: list[np.ndarray]
    mode: AutoresetMode
    table: dict[str, np.ndarray]
    restart: bool
    max_restarts: int
    half: np.ndarray
    busy: np.ndarray
    ended: np.ndarray
    killed: np.ndarray
    restarted: np.ndarray
    lost: np.ndarray
    next_episode: np.ndarray
    failures: np.ndarray
    broken: str | None
    known: dict[str, np.ndarray]
    values: dict[int, Any]
    ready: dict[int, EnvSpaces]
    obs_columns: list[str]

    @abstractmethod
    def dispatch(self, ids: np.ndarray) -> None:
        """Tell workers to do what the rows of environments say."""

    @abstractmethod
    def give_up(self, ids: np.ndarray) -> None:
        """Forget commands whose outcome is unknown; a reset is due."""

    @abstractmethod
    def finish(self, ids: np.ndarray, extras: Mapping[int, Extras]) -> None:
        """Take note of what a worker has done."""

    def _recover(self, worker: int, failure: Failure) -> Exception | None:
        """Restart a failed worker, settle its steps and do its resets again."""
        block = self.blocks[worker]
        message = self._describe(worker, failure)
        self.failures[worker] += 1
        # What its environments raise when they are first built, they raise each time.
        hopeless = failure.error is not None or (failure.raised and worker not in self.ready)
        if self.failures[worker] > self.max_restarts:
            hopeless = True
            message += (
                f"\nThat was failure {self.failures[worker]} in a row without an episode of its "
                f"environments ending (max_restarts={self.max_restarts}): giving up."
            )
        if hopeless or not self.restart:
            self.give_up(block)
            self.broken = message
            return failure.error or WorkerError(message)
        try:
            self.pool.respawn(worker)
        except BaseException:
            self.give_up(block)
            self.broken = message
            raise
        # Whatever it knew is gone: environments are seeded again, calls get no answer.
        if self.table:
            self.table["reseed"][block] = True
        self.values[worker] = WorkerError(message)
        busy, idle = block[self.busy[block]], block[~self.busy[block]]
        self.lost[idle[~self.ended[idle]]] = True
        self.restarted[busy] = True
        for i in busy.tolist():
            if self.table["op"][i] == STEP:
                self._settle_lost_step(i)
        again = block[self.busy[block]]
        if len(again):
            self.dispatch(again)
        note = "The worker was restarted."
        warnings.warn(f"{message}\n{note}", WorkerRestartWarning, stacklevel=outside())
        return None

    def _settle_lost_step(self, i: int) -> None:
        """Settle a step that died with its worker: truncated, at the last observation."""
        table, last, target = self.table, self.half[i], 1 - self.half[i]
        self.killed[i] = True
        same_step = self.mode == AutoresetMode.SAME_STEP
        prefix = "final_info" if same_step else "info"
        for key, values in self.known.items():
            table[key.replace("info", prefix, 1)][i] = values[i]
        for key, value in (
            ("success", False),
            ("is_success", False),
            ("executed_steps", 0),
            ("discount", 1.0),
        ):
            table[f"{prefix}/{key}"][i] = value
        if same_step:
            for name in self.obs_columns:
                table[f"final_{name}"][i] = table[name][last, i]
            table["op"][i] = RESET
            return
        for name in self.obs_columns:
            table[name][target, i] = table[name][last, i]
        table["reward"][i], table["terminated"][i], table["truncated"][i] = 0.0, False, True
        table["did_reset"][i] = table["episode_ended"][i] = False
        self.finish(np.array([i]), {})

    def _describe(self, worker: int, failure: Failure) -> str:
        block = self.blocks[worker]
        doing = failure.command
        if not failure.started:
            doing = "start"
        elif doing == "run":
            ops = self.table["op"][block[self.busy[block]]].tolist()
            doing = " and ".join(
                name for name, op in (("step", STEP), ("reset", RESET)) if op in ops
            )
        names = []
        for i in block.tolist():
            episode, task = self.next_episode[i] - 1, ""
            if episode >= 0 and int(self.known["info_set"][i]) & INFO_BITS["task_id"]:
                task = f"task {self.known['info/task_id'][i]}, "
            names.append(f"{i} ({task}episode {episode})" if episode >= 0 else f"{i}")
        return (
            f"Worker {worker} with environments {', '.join(names)} failed during {doing}. It "
            f"{failure.reason}"
        )


def outside() -> int:
    """Return the ``stacklevel`` of the first caller outside of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("vla_gym."):
        frame, level = frame.f_back, level + 1
    return level
