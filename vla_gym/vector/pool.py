"""What a vector environment needs of its workers, wherever they run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vla_gym.errors import VlaGymError, WorkerError
from vla_gym.vector.env_row import EnvRow
from vla_gym.vector.shared_memory import Layout, SharedArrays
from vla_gym.vector.worker import Extras, WorkerSpec, build_envs, run_row


class Failure(NamedTuple):
    """Why a worker is gone.

    Attributes:
        reason: What was seen, e.g. ``"was killed by signal SIGKILL"``.
        error: The package's own error, if that is what ended it.
        raised: Whether it was an exception.
        started: Whether its environments had been built.
        command: What it was told last.
    """

    reason: str
    error: VlaGymError | None
    raised: bool
    started: bool
    command: str


class Event(NamedTuple):
    """Something that a worker did.

    ``kind`` is ``"ready"`` (the spaces of its environments), ``"done"`` (ids, extras by
    environment id), ``"value"`` (results of a call), ``"raised"`` (an exception and the ids that
    it left undone; the worker goes on) or ``"failed"`` (a :class:`Failure`).
    """

    kind: str
    worker: int
    ids: np.ndarray
    value: Any


class Pool(Protocol):
    """What a vector environment needs of its workers.

    Another implementation may run them elsewhere, say on other machines.
    """

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""

    def attach(self, layout: Layout, *, same_step: bool) -> dict[str, np.ndarray]:
        """Share a table with the workers, once they are ready; return its arrays.

        They are emptied by :meth:`close`.
        """

    def run(
        self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any] | None = None
    ) -> None:
        """Have environments of a worker do what their rows say."""

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of rows; the results come as an event."""

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout`` seconds."""

    def respawn(self, worker: int) -> None:
        """Start a worker again after it failed."""

    def close(self) -> None:
        """End everything."""


class LocalPool:
    """The environments in this process: one worker that does everything at once."""

    @property
    def pids(self) -> tuple[int, ...]:
        """There are no processes."""
        return ()

    def __init__(self, spec: WorkerSpec) -> None:
        """Build the environments."""
        self._owner = os.getpid()
        self._envs, found = build_envs(spec)
        self._rows: dict[int, EnvRow] = {}
        self._memory: SharedArrays | None = None
        self._events = [Event("ready", 0, np.empty(0, np.int32), found)]

    def attach(self, layout: Layout, *, same_step: bool) -> dict[str, np.ndarray]:
        """Return the table, in memory of this process."""
        self._memory = SharedArrays(layout)
        table = self._memory.arrays
        self._rows = {i: EnvRow(env, i, table, same_step) for i, env in self._envs.items()}
        return table

    def run(
        self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any] | None = None
    ) -> None:
        """Have environments do what their rows say; exceptions become ``"raised"`` events."""
        del each
        began = time.perf_counter()
        extras: dict[int, Extras] = {}
        try:
            for i in ids.tolist():
                found = run_row(self._rows[i], (options or {}).get(i))
                if found:
                    extras[i] = found
            self._events.append(Event("done", worker, ids, extras))
        except Exception as error:
            self._events.append(Event("raised", worker, ids, error))
        assert self._memory is not None
        self._memory["busy_s"][worker] = time.perf_counter() - began

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of rows."""
        try:
            pairs = zip(ids, arguments, strict=True)
            value = [getattr(self._rows[i], method)(*a) for i, a in pairs]
            self._events.append(Event("value", worker, np.empty(0, np.int32), value))
        except Exception as error:
            self._events.append(Event("raised", worker, np.empty(0, np.int32), error))

    def poll(self, timeout: float | None) -> list[Event]:
        """Return what has happened; nothing is ever under way."""
        del timeout
        events, self._events = self._events, []
        return events

    def respawn(self, worker: int) -> None:
        """Never needed: a failure here is the trainer's own."""
        raise WorkerError(f"Worker {worker} runs in this process and can't be restarted.")

    def close(self) -> None:
        """Close the environments."""
        if os.getpid() != self._owner:
            return  # a fork of the trainer
        envs, self._envs, self._rows = self._envs, {}, {}
        for env in envs.values():
            env.close()
        if self._memory is not None:
            self._memory.close()
