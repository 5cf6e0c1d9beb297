"""How far collecting may be ahead of learning: the one place that knows.

::

    ahead = 0    collect 1 | learn 1 | collect 2 | learn 2 | ...             in turn
    ahead = 1    collect 1 | collect 2 | collect 3 | ...                     a fixed pipeline
                             learn 1   | learn 2   | ...
    ahead > 1    collecting goes on by itself with the newest weights, at most `ahead` blocks
                 beyond the one that is learned from
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vla_gym.errors import WorkerError

Weights = TypeVar("Weights")
Block = TypeVar("Block")


@dataclass(frozen=True)
class Collected(Generic[Block]):
    """A block that was collected.

    Attributes:
        block: What `collect` returned.
        staleness: Updates published since the weights that acted were taken, 0..ahead.
    """

    block: Block
    staleness: int


class Pipeline(Generic[Weights, Block]):
    """Collects blocks for a learner, as far ahead of it as it is allowed to.

    ::

        with Pipeline(collect, snapshot, ahead=1, deadline=600.0) as pipeline:
            while ...:
                collected = pipeline.next()
                ...                          # learn from collected.block
                pipeline.publish()

    With ``ahead`` 0 and 1 the weights of each block depend on the order of the calls alone, so
    the result does not depend on timing. All blocks are collected in one thread (a renderer
    belongs to the thread that made it): the caller's if ``ahead`` is 0, else one of its own.

    Attributes:
        ahead: Blocks that may be collected or under way beyond the one that is learned from.
        version: Updates published so far.
    """

    def __init__(
        self,
        collect: Callable[[Weights, int], Block],
        snapshot: Callable[[], Weights],
        *,
        ahead: int = 0,
        deadline: float,
        limit: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Prepare; collecting starts at the first :meth:`next` or :meth:`begin`.

        Args:
            collect: Collects a block with the given weights; the second argument numbers the
                blocks from 0.
            snapshot: Returns the learner's weights of this moment, which learning must not
                change any more. It is called in the learner's thread: with ``ahead`` 0 and 1 when
                a block begins (nothing acts then, so the weights of the block before may be
                overwritten), with more at each :meth:`publish`.
            ahead: See the class; 0 or more.
            deadline: Seconds that one block may take.
            limit: Blocks to hand out; no more are collected. None: until the end.
            state: What :meth:`state` of a pipeline with the same ``ahead`` returned: go on there.
        """
        self.ahead, self.version = ahead, 0
        self._collect, self._snapshot, self._deadline = collect, snapshot, deadline
        self._limit, self._taken, self._index = limit, 0, 0
        self._ready: deque[tuple[Block, int]] = deque()
        self._weights: tuple[Weights, int] | None = None  # of the next block, and their version
        self._ordered, self._holds = 0, 0
        self._is_collecting = self._is_stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if state is not None:
            self.version, self._index = state["version"], state["index"]
            self._ready.extend(state["ready"])
            self._weights = state["weights"]

    def __enter__(self) -> Pipeline[Weights, Block]:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """End the thread after the block under way, which :meth:`state` holds then."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._deadline)
            if self._thread.is_alive() and kind is None:
                raise self._overdue()

    # ------------------------------------------------------------------ learner's side

    @property
    def num_waiting(self) -> int:
        """Blocks that are collected, under way or begun, and not handed out."""
        with self._changed:  # who holds it already may ask, too
            return len(self._ready) + self._ordered + self._is_collecting

    def next(self, *, begin: bool = True) -> Collected[Block]:
        """Wait for the oldest block and let collecting go on.

        Args:
            begin: False begins no further block (see :meth:`begin`), for a caller who must look at
                this one first.

        Raises:
            WorkerError: If it takes longer than the deadline.
            Exception: Whatever ended collecting, after the blocks that were collected before.
        """
        if self.ahead == 0:
            self._take_snapshot()
            self._ready.append(self._play())
        if not self.num_waiting:
            self.begin()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready or self._error, self._deadline):
                raise self._overdue()
            if not self._ready:
                assert self._error is not None
                raise self._error
            block, version = self._ready.popleft()
            self._taken += 1
        if begin:
            self.begin()
        return Collected(block, self.version - version)

    def begin(self) -> None:
        """Let blocks begin until `ahead` are collected or under way; see :meth:`next`."""
        with self._changed:
            while self.num_waiting < self.ahead:
                if self._weights is None:
                    self._take_snapshot()
                if self._limit is not None and self._taken + self.num_waiting >= self._limit:
                    break
                self._ordered += 1
            if self._ordered and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def publish(self) -> None:
        """Say that the learner has finished an update."""
        with self._changed:
            self.version += 1
            if self.ahead > 1:
                self._take_snapshot()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing meanwhile, for a checkpoint; what is collected already stays.

        Raises:
            WorkerError: If the block under way takes longer than the deadline.
            Exception: Whatever ended collecting.
        """
        with self._changed:
            self._holds += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._is_collecting, self._deadline):
                    raise self._overdue()
                if self._error is not None:
                    raise self._error
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """Return what a pipeline needs to go on exactly: inside :meth:`paused`, or at the end.

        It holds the blocks that were collected and not handed out, and the weights of a block that
        was due and has not begun. It can be pickled if blocks and weights can.
        """
        return {
            "version": self.version,
            "index": self._index,
            "ready": list(self._ready),
            "weights": self._weights if self.ahead == 1 else None,
        }

    def _take_snapshot(self) -> None:
        self._weights = (self._snapshot(), self.version)

    def _overdue(self) -> WorkerError:
        return WorkerError(f"A block was not collected within {self._deadline:g} seconds.")

    # -------------------------------------------------------------- the thread's side

    def _play(self) -> tuple[Block, int]:
        """Collect one block with the weights that are due."""
        assert self._weights is not None
        weights, version = self._weights
        if self.ahead <= 1:
            self._weights = None
        block = self._collect(weights, self._index)
        self._index += 1
        return block, version

    def _run(self) -> None:
        try:
            while self._await_order():
                ready = self._play()
                with self._changed:
                    self._ready.append(ready)
                    self._is_collecting = False
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the learner's thread
            with self._changed:
                self._error, self._is_collecting = error, False
                self._changed.notify_all()

    def _await_order(self) -> bool:
        with self._changed:
            # However long the learner takes: __exit__ ends this wait in any case.
            self._changed.wait_for(lambda: self._is_stopped or (self._ordered and not self._holds))
            if self._is_stopped:
                return False
            self._ordered -= 1
            self._is_collecting = True
            return True
