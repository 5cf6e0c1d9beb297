"""What one part of a vector environment is told, and what it has not answered yet."""

from __future__ import annotations

import math
import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vla_gym.remote.messages import Answer
from vla_gym.remote.shards import Shard

_AGAIN_S = 0.5  # between two attempts to place a part


@dataclass(eq=False)
class Wanted:
    """What is waited for: of the environments that were begun one by one.

    Attributes:
        ids: These; None: any.
        count: So many of any; None: all.
    """

    ids: frozenset[int] | None = None
    count: int | None = None


@dataclass(eq=False)
class Link:
    """One part, and what it has been told and not answered.

    Attributes:
        worker: Number of the part.
        shard: Reaches it.
        limit: Seconds that it may be silent while it has something to do.
        answers: Gets this link and a future of each answer, from the threads that receive.
        since: When it was told something, or has last answered.
        ready: Whether it has answered, and so has come up.
        again_at: When it is to be placed again, after it was lost before it came up.
        losses: How often that was.
        obituary: Of the last one that did not come up.
        command: What it was told last.
        pending: Commands without an answer, each with its arguments and environments.
        going: Environments that were begun one by one.
    """

    worker: int
    shard: Shard
    limit: float
    answers: queue.SimpleQueue[tuple[Link, Future[Answer]]]
    since: float = field(default_factory=time.monotonic)
    ready: bool = False
    again_at: float | None = None
    losses: int = 0
    obituary: str = ""
    command: str = "start"
    pending: dict[Future[Answer], tuple[str, tuple[Any, ...], Any]] = field(default_factory=dict)
    going: set[int] = field(default_factory=set)
    _asking: Future[Answer] | None = None
    _asked: Wanted | None = None

    def ask(self, wanted: Wanted, total: int) -> None:
        """Ask for what was begun one by one (``total`` in all parts) and is wanted now, once."""
        is_asked = self._asked is wanted and self._asking in self.pending
        if is_asked or not self.going or self.again_at is not None:
            return
        asked: list[int] | int = sorted(self.going)
        if wanted.ids is not None:
            asked = sorted(self.going & wanted.ids)
        elif wanted.count is not None:  # its share: who has done it is asked for more
            asked = math.ceil(max(1, wanted.count) * len(self.going) / total)
        if asked:
            self._asked, self._asking = wanted, self.send("recv", (asked,))

    def send(self, command: str, arguments: tuple[Any, ...], ids: Any = ()) -> Future[Answer]:
        """Tell the part something; one that is to be placed again is told then."""
        if self.ready:
            self.command = command
            self.since = self.since if self.pending else time.monotonic()
        lost = self.again_at is not None
        future = Future() if lost else self.shard.submit(command, *arguments)
        self.pending[future] = command, arguments, ids
        future.add_done_callback(lambda done: self.answers.put((self, done)))
        return future

    def give_up(self, reason: str) -> None:
        """End a part that was lost before it came up: it is to be placed again in a moment."""
        self.shard.kill()
        self.losses += 1
        self.obituary = f" Lately a part of it {reason}."
        self.again_at = time.monotonic() + _AGAIN_S

    def go_on_with(self, shard: Shard) -> None:
        """Tell a part that was placed again all that the one before was told in vain."""
        told, self.pending = list(self.pending.values()), {}
        self.again_at, self.shard = None, shard
        for command, arguments, ids in told:
            if command != "recv":
                self.send(command, arguments, ids)
