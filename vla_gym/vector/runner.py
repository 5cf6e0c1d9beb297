"""Drives the workers of a vector environment, and replaces those that fail."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vla_gym.errors import ConfigError, WorkerError, WorkerRestartWarning
from vla_gym.vector.env_table import EnvTable
from vla_gym.vector.pool import Pool
from vla_gym.vector.shared_memory import INFO_BITS, RESET, STEP, table_layout
from vla_gym.vector.worker import EnvSpaces, Event, Failure


class Runner:
    """Tells workers what their environments do next, and takes note of what they did.

    Attributes:
        table: What is known of each environment.
        worker_of: (N,) worker of each environment.
        spaces: What all environments look like.
        broken: Why nothing works any more, or None.
        restarts: Of all workers so far.
        tell: What a restart is told to.
    """

    def __init__(
        self, pool: Pool, mode: AutoresetMode, *, max_restarts: int, first: int = 0
    ) -> None:
        """Wait until the workers of a pool have built their environments.

        After ``max_restarts`` failures of a worker in which none of its episodes ends, the next one
        is an error. ``first``: see :class:`EnvTable`.

        Raises:
            ConfigError: If the spaces differ or don't fit into arrays.
            WorkerError: If the environments can't be built.
        """
        self.pool, self.blocks, self.mode = pool, pool.blocks, mode
        self.broken: str | None = None
        self.restarts = 0
        self.tell: Callable[[str], None] = warn_of_restart
        self._max_restarts = max_restarts
        self._each = False  # whether answers to what is under way come one by one
        n = sum(len(block) for block in self.blocks)
        self.worker_of = np.concatenate([np.full(len(b), w) for w, b in enumerate(self.blocks)])
        self.table = EnvTable(n, first)
        # Of each worker: failures since an episode of its environments ended, its spaces once they
        # are built, whether the answer to a call is under way, and that answer.
        self._failures = np.zeros(len(self.blocks), np.int64)
        self._ready: dict[int, EnvSpaces] = {}
        self._called: set[int] = set()
        self._values: dict[int, Any] = {}
        self.wait(lambda: len(self._ready) == len(self.blocks))
        self.spaces = self._ready[0]
        for worker, block in enumerate(self.blocks):
            self._ready[worker].check_same(int(block[0]), self.spaces)
        if isinstance(self.spaces.action_space, spaces.Dict):
            raise ConfigError(
                f"Expected one array as action space, got {self.spaces.action_space}."
            )
        same_step = mode == AutoresetMode.SAME_STEP
        layout = table_layout(
            self.spaces.observation_space,
            self.spaces.action_space,
            n,
            len(self.blocks),
            final_rows=same_step,
        )
        self.table.attach(pool.attach(layout, same_step=same_step))

    def reset(
        self, ids: np.ndarray, options: Mapping[int, dict[str, Any]], *, each: bool = False
    ) -> None:
        """Have environments reset."""
        self.table.lost[ids] = False
        self.launch(ids, np.full(len(ids), RESET, np.int8), options, each=each)

    def step(self, ids: np.ndarray, *, each: bool = False) -> None:
        """Have environments execute their action, or reset where the last episode is over."""
        ops = np.where(self.table.ended[ids], RESET, STEP).astype(np.int8)
        self.launch(ids, ops, {}, each=each)

    def launch(
        self, ids: np.ndarray, ops: np.ndarray, options: Mapping[int, dict[str, Any]], *, each: bool
    ) -> None:
        """Have environments do what ``ops`` says, with options for those that are reset."""
        table, self._each = self.table, each
        table.begin(ids, ops)
        table.options |= options
        if table.lost.any():
            for i in ids[table.lost[ids]].tolist():
                table.lost[i] = False
                table.settle_lost_step(i, self.mode)
            ids = ids[table.busy[ids]]
        self._dispatch(ids)

    def _dispatch(self, ids: np.ndarray) -> None:
        """Tell workers to do what the rows of environments say."""
        table = self.table
        if len(ids) == len(table.busy):
            blocks = list(enumerate(self.blocks))
        else:
            workers = self.worker_of[ids]
            blocks = [(w, ids[workers == w]) for w in np.unique(workers).tolist()]
        options = {i: table.options[i] for i in ids.tolist() if i in table.options}
        try:
            for worker, block in blocks:
                self.pool.run(worker, block, each=self._each, options=options)
        except BaseException:
            table.give_up(ids)
            raise

    def wait(self, enough: Callable[[], bool], timeout: float | None = None) -> None:
        """Handle events until there are enough.

        Raises:
            TimeoutError: After ``timeout`` seconds; what is under way goes on.
            WorkerError: A worker failed for good.
            VlaGymError: One that an environment raised.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not enough():
            left = None if end is None else max(0.0, end - time.monotonic())
            events = self.pool.poll(left)
            if not events and timeout is None:
                self.broken = (
                    "A worker's answer was lost. Make the environment anew, and report this with "
                    "the calls before it."
                )
                raise WorkerError(self.broken)
            if not events:
                raise TimeoutError(f"Not done after {timeout} s; call again to wait on.")
            error: Exception | None = None
            for event in events:
                found = self._handle(event)
                if error is None or not isinstance(found, Warning | None):
                    error = found
            if error is not None:
                raise error

    def idle(self) -> bool:
        """Tell whether no command is under way."""
        return not self.table.busy.any()

    def call(self, calls: Mapping[int, tuple[Any, ...]], method: str) -> list[Any]:
        """Call a method of ``EnvRow`` of idle environments, with arguments by environment.

        Raises:
            WorkerError: If a worker died over it.
            Exception: What the method raised.
        """
        self.wait(lambda: not self._called)  # by a call that was interrupted
        ids = np.array(list(calls), np.int64)
        workers = np.unique(self.worker_of[ids]).tolist()
        asked = {worker: ids[self.worker_of[ids] == worker].tolist() for worker in workers}
        for worker, own in asked.items():
            self.pool.call(worker, own, method, [calls[i] for i in own])
            self._called.add(worker)
        self.wait(lambda: not self._called)
        results: dict[int, Any] = {}
        for worker in workers:
            value = self._values[worker]
            if isinstance(value, Exception):
                raise value
            results.update(zip(asked[worker], value, strict=True))
        return [results[i] for i in ids.tolist()]

    def _handle(self, event: Event) -> Exception | None:
        worker = event.worker
        if event.kind == "done":
            ended = self.table.finish(np.array(event.ids), event.value)
            if len(ended):
                self._failures[self.worker_of[ended]] = 0
        elif event.kind == "ready":
            self._ready[worker] = event.value
        elif event.kind == "failed":
            return self._recover(worker, event.value)
        elif event.kind == "restarted":
            self.table.restarted[event.ids], self.table.killed[event.value] = True, True
        elif event.kind == "told":
            return self._tell(event.value)
        elif worker in self._called:  # calls come one at a time, and before the next step
            self._called.discard(worker)
            self._values[worker] = event.value
        else:
            self.table.give_up(np.array(event.ids, np.int64))
            return event.value
        return None

    def _recover(self, worker: int, failure: Failure) -> Exception | None:
        """Restart a failed worker, settle its steps and do its resets again."""
        block = self.blocks[worker]
        message = self._describe(worker, failure)
        self._failures[worker] += 1
        # What its environments raise when they are first built, they raise each time.
        hopeless = failure.error is not None or (failure.raised and worker not in self._ready)
        if self._failures[worker] > self._max_restarts:
            hopeless = True
            message += (
                f"\nThat was failure {self._failures[worker]} in a row without an episode of its "
                f"environments ending (max_restarts={self._max_restarts}): giving up."
            )
        try:
            if hopeless:
                raise failure.error or WorkerError(message)
            self.pool.start(worker)
        except BaseException:
            self.table.give_up(block)
            self.broken = message
            raise
        self.restarts += 1
        if worker in self._called:  # nobody is going to answer
            self._called.discard(worker)
            self._values[worker] = WorkerError(message)
        again = self.table.lose(block, self.mode)
        if len(again):
            self._dispatch(again)
        return self._tell(f"{message}\nThe worker was restarted.")

    def _tell(self, message: str) -> Exception | None:
        try:
            self.tell(message)
        except Warning as error:  # with -W error; the events that came with it count all the same
            return error
        return None

    def _describe(self, worker: int, failure: Failure) -> str:
        table, block, doing = self.table, self.blocks[worker], failure.command
        if not failure.started:
            doing = "start"
        elif doing == "run":
            ops = table.columns["op"][block[table.busy[block]]].tolist()
            doing = " and ".join(
                name for name, op in (("step", STEP), ("reset", RESET)) if op in ops
            )
            doing = doing or "a pause"
        names = []
        for i in block.tolist():
            episode = int(table.columns["episode"][i]) - 1 if table.columns else -1
            task = ""
            if episode >= 0 and int(table.known["info_set"][i]) & INFO_BITS["task_id"]:
                task = f"task {table.known['info/task_id'][i]}, "
            number = table.first + i
            names.append(f"{number} ({task}episode {episode})" if episode >= 0 else f"{number}")
        return (
            f"Worker {worker} with environments {', '.join(names)} failed during {doing}. It "
            f"{failure.reason}"
        )


def warn_of_restart(message: str) -> None:
    """Warn the caller of the vector environment."""
    warnings.warn(message, WorkerRestartWarning, stacklevel=_outside())


def _outside() -> int:
    """Return the ``stacklevel`` of the first caller outside of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("vla_gym."):
        frame, level = frame.f_back, level + 1
    return level
