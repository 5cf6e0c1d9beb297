"""One worker process as the trainer sees it: how it ends, and what it has been told."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

from vla_gym.errors import WorkerError
from vla_gym.vector.server import LONGEST_ANSWER, kill_group


class Server(Protocol):
    """What a worker's handle asks of the ``ProcessServer`` that has forked it."""

    def check_usable(self) -> None:
        """Raise if the server is gone."""

    def bury(self, reason: str | None, cause: BaseException | None) -> NoReturn:
        """Give the server up and raise ServerDied."""
        ...


class ServerDied(WorkerError):
    """The process server is gone, and all of its workers with it."""


class WorkerProcess:
    """A worker process that a ``ProcessServer`` has forked.

    Attributes:
        pid: Its process id; nobody else gets it before the exit code is known here.
    """

    def __init__(self, server: Server, pid: int, control: socket.socket) -> None:
        """Take over the socket of the request that it came from."""
        self.pid = pid
        self._server, self._control = server, control
        self._exit_code: int | None = None

    def exit_code(self, timeout: float) -> int | None:
        """Wait for its end.

        Args:
            timeout: In seconds; 0 just looks.

        Returns:
            Its exit code, negative for a signal; None if it is not known after that time.

        Raises:
            ServerDied: If the server is gone, its workers are dead, too.
        """
        if self._exit_code is not None:
            return self._exit_code
        try:
            self._server.check_usable()
            self._control.settimeout(max(0.0, timeout))
            answer = self._control.recv(LONGEST_ANSWER)
            if not answer:
                self._server.bury(None, None)
        except (TimeoutError, BlockingIOError):
            return None
        except ConnectionResetError as error:
            self._server.bury(None, error)
        except ServerDied:
            self._control.close()
            raise
        self._exit_code = int(pickle.loads(answer))
        hang_up(self._control)
        return self._exit_code

    def kill(self, timeout: float) -> int | None:
        """SIGKILL it, stopped or not, with the processes of its group.

        The signal does not need the server, so this ends a worker even while the server is busy.

        Args:
            timeout: Seconds to wait for its end and for the server's word.

        Returns:
            Its exit code, negative for a signal; None if it is not known within the deadline.

        Raises:
            ServerDied: If the server is gone, its workers are dead, too.
        """
        if self._exit_code is None:
            with contextlib.suppress(WorkerError):  # exit_code() raises it
                self._server.check_usable()
                kill_group(self.pid)
        return self.exit_code(timeout)


@dataclass
class WorkerHandle:
    """A worker process as the pool sees it: how to reach it, and what it has been told."""

    connection: Connection
    process: WorkerProcess
    server: Server
    step_timeout: float
    start_timeout: float
    ready: bool = False
    answered: bool = False
    outstanding: int = 0
    command: str = "start"
    active_at: float = 0.0
    progress: int = 0

    @property
    def busy(self) -> bool:
        """Whether it is to say something."""
        return bool(self.outstanding) or not self.ready

    @property
    def limit(self) -> float:
        """Seconds that it may go without progress."""
        # The first image may have to wait for drawing code to be compiled, by all workers at once.
        return self.step_timeout if self.answered else self.start_timeout


def socket_pair(timeout: float) -> tuple[socket.socket, socket.socket]:
    """Return a socket for the trainer and one for its worker.

    Args:
        timeout: Seconds that the trainer waits at most with a message half through.
    """
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(timeout) + 1, 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return ours, theirs


def hang_up(end: socket.socket) -> None:
    """Shut a socket down and close it."""
    # Closing alone would say nothing while a forked child of the trainer holds the socket, too.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def describe_exit(code: int | None) -> str:
    """Say how a process ended, by its exit code (negative: signal)."""
    if code is None:
        return "is gone"
    if code < 0:
        try:
            return f"was killed by signal {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"left with exit code {code}"
