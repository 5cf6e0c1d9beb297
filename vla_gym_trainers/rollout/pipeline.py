"""How far collecting may be ahead of learning: the one place that knows.

::

    ahead = 0    collect 1 | learn 1 | collect 2 | learn 2 | ...             in turn
    ahead = 1    collect 1 | collect 2 | collect 3 | ...                     a fixed pipeline
                             learn 1   | learn 2   | ...
    ahead > 1    collecting goes on by itself with the newest weights, at most `ahead` blocks
                 beyond the one that is learned from
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from vla_gym.errors import WorkerError

Weights = TypeVar("Weights")
Block = TypeVar("Block")


class Pipeline(Generic[Weights, Block]):
    """Collects blocks for a learner, as far ahead of it as it is allowed to.

    ::

        with Pipeline(collect, snapshot, ahead=1, deadline=600.0) as pipeline:
            while ...:
                block, staleness = pipeline.next()
                ...                          # learn from the block
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
        self.ahead, self.version, self._index = ahead, 0, 0
        self._collect, self._snapshot, self._deadline = collect, snapshot, deadline
        #: Blocks that are not handed out, the oldest first, each with its weights' version.
        self._blocks: deque[Future[tuple[Block, int]]] = deque()
        self._weights: tuple[Weights, int] | None = None  # of the next block, and their version
        self._error: BaseException | None = None
        if state is not None:
            self.version, self._index = state["version"], state["index"]
            self._weights = state["weights"]
            for ready in state["ready"]:
                self._blocks.append(Future())
                self._blocks[-1].set_result(ready)
        self._left = math.inf if limit is None else limit - len(self._blocks)  # to be begun
        self._orders: SimpleQueue[Future[tuple[Block, int]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """End the thread after the block under way, which :meth:`state` holds then."""
        self._withdraw()
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(self._deadline)
            if self._thread.is_alive() and kind is None:
                raise self._overdue()

    @property
    def num_waiting(self) -> int:
        """Blocks that are collected, under way or begun, and not handed out."""
        return len(self._blocks)

    def next(self, *, begin: bool = True) -> tuple[Block, int]:
        """Wait for the oldest block and let collecting go on.

        Args:
            begin: False begins no further block (see :meth:`begin`), for a caller who must look at
                this one first.

        Returns:
            What ``collect`` returned, and its staleness: updates published since the weights that
            acted were taken, 0..ahead.

        Raises:
            WorkerError: If it takes longer than the deadline.
            Exception: Whatever ended collecting, after the blocks that were collected before.
        """
        if self.ahead == 0:
            self._take_snapshot()
            return self._play()[0], 0
        if not self._blocks:
            self.begin()
        if wait([self._blocks[0]], self._deadline).not_done:
            raise self._overdue()
        block, version = self._blocks.popleft().result()
        if begin:
            self.begin()
        return block, self.version - version

    def begin(self) -> None:
        """Let blocks begin until `ahead` are collected or under way; see :meth:`next`."""
        while len(self._blocks) < self.ahead:
            if self._weights is None:
                self._take_snapshot()  # also where none is left: a later pipeline goes on with it
            if self._left <= 0:
                break
            self._left -= 1
            self._order()

    def publish(self) -> None:
        """Say that the learner has finished an update."""
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
        withdrawn = self._withdraw()
        try:
            if wait(self._blocks, self._deadline).not_done:
                raise self._overdue()
            if self._error is not None:
                raise self._error
            yield
        finally:
            for _ in range(withdrawn):
                self._order()

    def state(self) -> dict[str, Any]:
        """Return what a pipeline needs to go on exactly: inside :meth:`paused`, or at the end.

        It holds the blocks that were collected and not handed out, and the weights of a block that
        was due and has not begun. It can be pickled if blocks and weights can.
        """
        done = [block for block in self._blocks if block.done() and block.exception() is None]
        return {
            "version": self.version,
            "index": self._index,
            "ready": [block.result() for block in done],
            "weights": self._weights if self.ahead == 1 else None,
        }

    def _take_snapshot(self) -> None:
        self._weights = (self._snapshot(), self.version)

    def _overdue(self) -> WorkerError:
        return WorkerError(f"A block was not collected within {self._deadline:g} seconds.")

    def _order(self) -> None:
        """Have the thread collect a block, after those that it was told to before."""
        self._blocks.append(Future())
        self._orders.put(self._blocks[-1])
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
            self._thread.start()

    def _withdraw(self) -> int:
        """Take back the orders of blocks that have not begun; return how many they were."""
        before = len(self._blocks)
        while self._blocks and self._blocks[-1].cancel():
            self._blocks.pop()
        return before - len(self._blocks)

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
        while (block := self._orders.get()) is not None:
            if not block.set_running_or_notify_cancel():
                continue
            try:
                if self._error is not None:
                    raise self._error
                block.set_result(self._play())
            except BaseException as error:  # raised again in the learner's thread
                self._error = error
                block.set_exception(error)
