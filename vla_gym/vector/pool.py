"""What a vector environment needs of its workers, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vla_gym.errors import VlaGymError


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

    ``kind`` is ``"ready"``, ``"done"`` (ids, extras by environment id), ``"value"`` (results of a
    call), ``"raised"`` (an exception and the ids that it left undone; the worker goes on) or
    ``"failed"`` (a :class:`Failure`).
    """

    kind: str
    worker: int
    ids: np.ndarray
    value: Any


class Pool(Protocol):
    """What a vector environment needs of its workers."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""

    def run(
        self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any] | None = None
    ) -> None:
        """Have environments of a worker do what their rows say."""

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of slots; the results come as an event."""

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout`` seconds."""

    def respawn(self, worker: int) -> None:
        """Start a worker again after it failed."""

    def close(self) -> None:
        """End everything."""
