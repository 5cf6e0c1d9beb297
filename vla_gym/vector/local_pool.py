"""The environments in the trainer's own process (``workers=0``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_gym.errors import WorkerError
from vla_gym.vector import protocol
from vla_gym.vector.memory import SharedArrays
from vla_gym.vector.pool import Event
from vla_gym.vector.slot import Slot
from vla_gym.vector.worker import run_slot


class LocalPool:
    """The environments in this process: one worker that does everything at once."""

    @property
    def pids(self) -> tuple[int, ...]:
        """There are no processes."""
        return ()

    def __init__(self, slots: dict[int, Slot], memory: SharedArrays) -> None:
        """Take over built environments."""
        self._slots, self._memory = slots, memory
        self._events: list[Event] = []

    def run(
        self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any] | None = None
    ) -> None:
        """Have environments do what their rows say; exceptions become ``"raised"`` events."""
        del each
        began = time.perf_counter()
        extras: dict[int, protocol.Extras] = {}
        try:
            for i in ids.tolist():
                found = run_slot(self._slots[i], (options or {}).get(i))
                if found:
                    extras[i] = found
            self._events.append(Event("done", worker, ids, extras))
        except Exception as error:
            self._events.append(Event("raised", worker, ids, error))
        self._memory["busy_s"][worker] = time.perf_counter() - began

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of slots."""
        try:
            pairs = zip(ids, arguments, strict=True)
            value = [getattr(self._slots[i], method)(*a) for i, a in pairs]
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
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.env.close()
