"""Gradient steps in a thread of their own while the environments step (TD3BC's ``pipelined``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundUpdates:
    """One block of work at a time, and the transitions that wait until it has ended.

    The work samples a replay buffer that must not change under it, so what is collected meanwhile
    is kept here.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None
        self._waiting: list[tuple[Any, ...]] = []

    @property
    def is_busy(self) -> bool:
        """Whether work was started that :meth:`finish` has not yet taken note of."""
        return self._work is not None

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Begin ``work(*arguments)``; :meth:`finish` must have ended the work before."""
        assert self._work is None
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="td3bc-learner")
        self._work = self._executor.submit(work, *arguments)

    def add(self, *transition: Any) -> None:
        """Keep a transition for later; stands in for ``ReplayBuffer.add``."""
        self._waiting.append(transition)

    def finish(self) -> None:
        """Wait for the work.

        Raises:
            Exception: Whatever ended it.
        """
        if self._work is not None:
            work, self._work = self._work, None
            work.result()

    def take_transitions(self) -> list[tuple[Any, ...]]:
        """Return the transitions that were kept, and keep them no longer."""
        transitions, self._waiting = self._waiting, []
        return transitions

    def close(self) -> None:
        """End the thread after the work under way; :meth:`start` makes another."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
