"""The trainer's handles on the process server and on the workers that it forks."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vla_gym.errors import WorkerError
from vla_gym.vector.processes.server import LONGEST_ANSWER, hang_up, kill_group, surroundings

_PROGRAM = "vla_gym.vector.processes.server"
#: How long a server that is told to end, or that has closed its link, may take to be gone.
EXIT_S = 10.0
# The server's own libraries must not start threads: forks would lack them.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


class ServerDied(WorkerError):
    """The process server is gone, and all of its workers with it."""


class ProcessServer:
    """One process server; get it by :meth:`acquire`, give it back by :meth:`release`.

    All users in a trainer process share one server. Every method may be called from any thread.
    """

    def __init__(self) -> None:
        """Start a server process; it answers when it has come up."""
        self._owner, self._users = os.getpid(), 0
        self._obituary: str | None = None
        # One request at a time. Reentrant, because the garbage collector may close an environment,
        # which releases the server, while this thread waits for an answer.
        self._lock = threading.RLock()
        self._link, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with remote:
                self._process = _start(remote)
        except BaseException:
            self._link.close()
            raise
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._owner, self._link, self._process)

    @classmethod
    def acquire(cls) -> ProcessServer:
        """Return the server of this process; one is started when there is none that runs."""
        global _current
        with _current_lock:
            if _current is None or not _current.alive:
                _current = cls()
            _current._users += 1
            return _current

    def release(self) -> None:
        """Give the server back; the last release ends it and its workers and waits for that."""
        global _current
        if os.getpid() != self._owner:
            return
        with _current_lock:
            self._users -= 1
            if self._users > 0:
                return
            if _current is self:
                _current = None
            self._obituary = self._obituary or "was released"
            self._end()

    @property
    def alive(self) -> bool:
        """Whether the server runs, as far as is known without asking it."""
        return self._obituary is None and self._process.poll() is None

    def load(self, target: str, *, timeout: float, **arguments: Any) -> None:
        """Call ``target(**arguments)`` in the server: later workers share what it loads.

        A VlaGymError of the function is raised here, others as WorkerError; see :meth:`spawn`.
        """
        _, control = self._ask(None, target, arguments, _ONE_THREAD, timeout)
        control.close()

    def spawn(
        self,
        target: str,
        payload: bytes,
        fds: Sequence[int],
        environ: Mapping[str, str],
        *,
        timeout: float,
    ) -> WorkerProcess:
        """Fork a worker that calls a function with ``(payload, fds)`` and ends when that returns.

        The worker sees the trainer's environment variables (but for ``environ``), working
        directory, ``sys.path`` and ``sys.argv`` as they are now. It ignores SIGINT.

        Args:
            target: ``"module:function"``.
            payload: Passed on.
            fds: A few descriptors that it gets copies of, under other numbers.
            environ: Environment variables that differ from the trainer's.
            timeout: In seconds. A server that misses it is killed, with all its workers.

        Raises:
            ServerDied: If the server is gone, or missed the deadline.
            WorkerError: If it cannot fork, or was busy with another thread's request until then.
        """
        pid, control = self._ask(fds, target, payload, environ, timeout)
        return WorkerProcess(self, pid, control)

    def check_usable(self) -> None:
        """Raise ServerDied if the server is known to be gone, WorkerError in another process."""
        if os.getpid() != self._owner:
            raise WorkerError(
                f"This process server belongs to process {self._owner}; a process that was forked "
                "from it needs an environment of its own."
            )
        if self._obituary is not None:
            raise ServerDied(f"The process server {self.pid} {self._obituary}.")

    def _ask(
        self,
        fds: Sequence[int] | None,
        target: str,
        arguments: Any,
        environ: Mapping[str, str],
        timeout: float,
    ) -> tuple[Any, socket.socket]:
        """Send a request: fork if there are ``fds``; return the answer and where it came from."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(0.0, timeout)):
            raise WorkerError(
                f"The process server {self.pid} was busy with another request for {timeout:g} s."
            )
        try:
            self.check_usable()
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    request = (surroundings(environ), target, arguments, fds is not None)
                    self._send(request, [theirs.fileno(), *(fds or ())], deadline)
                control.settimeout(max(0.001, deadline - time.monotonic()))
                answer = control.recv(LONGEST_ANSWER)
                if not answer:
                    self.bury(None, None)
            except BaseException:
                hang_up(control)  # a worker that nobody knows of is ended by that
                raise
        except TimeoutError as late:
            what = "spawn" if fds is not None else target.rpartition(":")[2]
            self.bury(f"did not answer {what!r} within {timeout:g} s and was killed", late)
        except (BrokenPipeError, ConnectionResetError) as error:
            self.bury(None, error)
        except OSError as error:
            raise WorkerError(f"No request can be sent to the process server: {error}.") from error
        finally:
            self._lock.release()
        value = pickle.loads(answer)
        if isinstance(value, Exception):
            control.close()
            raise value
        return value, control

    def _send(self, request: Any, fds: Sequence[int], deadline: float) -> None:
        # The content travels as a memory file: a packet is never cut in two, whatever its size,
        # and sending it does not wait for the server to read.
        with open(os.memfd_create("vla_gym-request"), "wb") as file:
            pickle.dump(request, file, pickle.HIGHEST_PROTOCOL)
            file.flush()
            self._link.settimeout(max(0.001, deadline - time.monotonic()))
            socket.send_fds(self._link, [b"r"], [fds[0], file.fileno(), *fds[1:]])

    def bury(self, reason: str | None, cause: BaseException | None) -> NoReturn:
        """Make sure that the server is dead, say so to all later callers, and raise it."""
        self.check_usable()
        if reason is not None:
            self._process.kill()
        self._end()
        self._obituary = reason or f"is gone, with its workers (exit code {self._process.wait()})"
        raise ServerDied(f"The process server {self.pid} {self._obituary}.") from cause


class WorkerProcess:
    """A worker process that a :class:`ProcessServer` has forked.

    Attributes:
        server: What has forked it.
        pid: Nobody else gets it before the exit code is known here.
    """

    def __init__(self, server: ProcessServer, pid: int, control: socket.socket) -> None:
        self.server, self.pid, self._control = server, pid, control
        self._exit_code: int | None = None

    def exit_code(self, timeout: float) -> int | None:
        """Wait for its end, some seconds or, with 0, not at all; return its exit code.

        It is negative for a signal, None if it is not known then. ServerDied says that it is dead.
        """
        if self._exit_code is not None:
            return self._exit_code
        try:
            self.server.check_usable()
            self._control.settimeout(max(0.0, timeout))
            answer = self._control.recv(LONGEST_ANSWER)
            if not answer:
                self.server.bury(None, None)
        except (TimeoutError, BlockingIOError):
            return None
        except ConnectionResetError as error:
            self.server.bury(None, error)
        except ServerDied:
            self._control.close()
            raise
        self._exit_code = int(pickle.loads(answer))
        hang_up(self._control)
        return self._exit_code

    def abort(self, timeout: float) -> None:
        """Have it write to stderr where each of its threads is, which ends it; wait some seconds.

        A process that is stopped does neither: kill() it then.
        """
        if self.exit_code(0) is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGABRT)  # the server has enabled faulthandler
            self.exit_code(timeout)

    def kill(self, timeout: float) -> int | None:
        """SIGKILL it, stopped or not, with the processes of its group; wait as exit_code().

        The signal does not need the server, so this ends a worker even while the server is busy.
        """
        if self._exit_code is None:
            with contextlib.suppress(WorkerError):  # exit_code() raises it
                self.server.check_usable()
                kill_group(self.pid)
        return self.exit_code(timeout)


_current: ProcessServer | None = None
_current_lock = threading.RLock()


def _forget() -> None:
    """In a forked child of the trainer: the server is not ours, and the link not ours to hold."""
    global _current, _current_lock
    _current_lock = threading.RLock()
    if _current is not None:
        _current._link.close()
        _current = None


os.register_at_fork(after_in_child=_forget)


def _start(remote: socket.socket) -> subprocess.Popen[bytes]:
    # What made our own imports work, a bare checkout or a changed sys.path, works there, too; -P:
    # the working directory shall come first only if it does so here.
    checkout = str(Path(__file__).absolute().parents[3])
    here = surroundings({})["folder"] or os.sep
    paths = [os.path.join(here, path) for path in map(str, sys.path)]
    environ = {**os.environ, **_ONE_THREAD}
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, checkout]))
    command = [sys.executable, "-P", "-m", _PROGRAM, str(remote.fileno()), str(os.getpid())]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environ,
            pass_fds=[remote.fileno()],
            start_new_session=True,  # a Ctrl-C is for the trainer alone
        )
    except OSError as error:
        raise WorkerError(f"No process server starts with {sys.executable!r}: {error}.") from error


def _end(owner: int, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a server and wait for it; its workers are gone then."""
    if os.getpid() != owner:
        return
    hang_up(link)
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
