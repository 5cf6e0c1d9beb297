"""Ctrl-C, SIGTERM, a full disk: a run ends where it can be resumed, and says so."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vla_gym.disk_full import is_disk_full
from vla_gym.errors import DiskFullError
from vla_gym_trainers.runs.run_dir import RunDir

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody wants the run to end.

    Attributes:
        is_made: A signal came during :meth:`deferred`.
    """

    def __init__(self) -> None:
        self.is_made = self._defers = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block a first signal only sets :attr:`is_made`; a second one ends it at once.

        Raises:
            KeyboardInterrupt: At the end of the block, if a signal came.
        """
        self._defers = True
        try:
            yield
        finally:
            self._defers = False
        if self.is_made:
            raise KeyboardInterrupt

    def handle(self, *_: Any) -> None:
        """Take note of a signal.

        Raises:
            KeyboardInterrupt: Outside of :meth:`deferred`, and for the second signal.
        """
        if not self._defers or self.is_made:
            raise KeyboardInterrupt
        self.is_made = True
        sys.stderr.write("\nStopping, with a checkpoint. Again: at once.\n")


@contextmanager
def stoppable(run: RunDir, command: str | None) -> Iterator[StopRequest]:
    """Have Ctrl-C, SIGTERM and a full disk end a run with the advice how to go on.

    Signals reach a process's main thread; in other threads this changes nothing. A command of None
    has no checkpoints to go on from.

    Raises:
        KeyboardInterrupt: After a signal; its text is for the user.
        DiskFullError: If something could not be written for lack of space.
    """
    request = StopRequest()
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, request.handle) for number in _SIGNALS}
    try:
        yield request
    except KeyboardInterrupt as error:
        how = "Stopped: run the command again."
        if command is not None:
            how = f"Stopped. Go on with: vla-gym-train {command} --resume {run.path}"
        raise KeyboardInterrupt(how) from error
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise DiskFullError(_full_disk(run, command)) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _full_disk(run: RunDir, command: str | None) -> str:
    if command is None or not run.config.is_file():
        return f"The disk of {run.path} is full: free some space and run the command again."
    whole = run.checkpoints()
    newest = f"Its newest checkpoint is {whole[-1].name}" if whole else "It has no checkpoint yet"
    return (
        f"The disk of {run.path} is full. {newest}. Free some space and go on with: "
        f"vla-gym-train {command} --resume {run.path}"
    )
