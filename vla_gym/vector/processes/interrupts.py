"""Ctrl-C at a moment when nothing can be lost by it."""

from __future__ import annotations

# The functions behind ``signal``'s, which makes an enum member of each handler: that would cost a
# twentieth of a step of cheap environments.
import _signal  # type: ignore[import-not-found]
import functools
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

from vla_gym.errors import WorkerError

_SIGINT = int(signal.SIGINT)

P = ParamSpec("P")
T = TypeVar("T")


class Interrupts:
    """A context in which Ctrl-C is held back, except while :meth:`wait` waits.

    Python raises KeyboardInterrupt between any two instructions of the main thread. Between a
    message that was read and the note of what it said, that would lose the message, and an
    environment would wait for it until its worker counts as hung. So it comes while there is
    nothing to do but wait, or at the end of the context. A second Ctrl-C is not held back.

    Attributes:
        owner: Process that made it; a fork of that has other environments to step.
    """

    def __init__(self) -> None:
        """Nothing is held back yet."""
        self.owner = os.getpid()
        self._depth = 0
        self._waiting = self._held = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    @property
    def in_fork(self) -> bool:
        """Whether this process is a fork of its owner."""
        return os.getpid() != self.owner

    def __enter__(self) -> None:
        """Begin to hold back."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth == 0:
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(_SIGINT, self._on_signal)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Let Ctrl-C act as before, also one that came in the meantime."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            _signal.signal(_SIGINT, handler)
            if self._held:
                self._held = False
                handler(_SIGINT, None)

    def wait(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may be interrupted."""
        self._waiting = True
        try:
            if self._held:
                self._on_signal(_SIGINT, None)
            return function(*args, **kwargs)
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self._handler
        if handler is not None and (self._waiting or self._held):
            self._held = False
            handler(number, frame)
        else:
            self._held = True


def undivided(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Let Ctrl-C interrupt a method only while it waits: in the context ``self._interrupts``.

    A fork of the process that made the environments gets a ``WorkerError``: it shares their memory
    and their pipes, and would move the other's environments without its knowing.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        interrupts: Interrupts = self._interrupts
        if interrupts.in_fork:
            raise WorkerError(
                f"{method.__name__}() in process {os.getpid()}, a fork of process "
                f"{interrupts.owner}, which made these environments: make new ones in this process."
            )
        with interrupts:
            return method(self, *args, **kwargs)

    return call
