"""The trainer's handle on the process server that forks its workers."""

from __future__ import annotations

import contextlib
import os
import pickle
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
from vla_gym.vector.server import LONGEST_ANSWER, surroundings
from vla_gym.vector.worker_process import ServerDied, WorkerProcess, hang_up

WORKER = "vla_gym.vector.worker:main"
#: How long a server that is told to end, or that has closed its link, may take to be gone.
EXIT_S = 10.0
# The server's own libraries must not start threads: forks would lack them.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


class ServerTimeout(WorkerError, TimeoutError):
    """The process server did not answer in time, but is not given up."""


class ProcessServer:
    """One process server; get it by :meth:`acquire`, give it back by :meth:`release`.

    All users in a trainer process share one server. Every method may be called from any thread.

    Attributes:
        pid: Process id of the server.
    """

    def __init__(self) -> None:
        """Start a server process; it answers when it has come up."""
        self._owner = os.getpid()
        self._users = 0
        self._obituary: str | None = None
        # One request at a time. Reentrant, because the garbage collector may close an environment,
        # which releases the server, while this thread waits for an answer.
        self._lock = threading.RLock()
        self._link, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            try:
                self._process = _start(remote)
            except BaseException:
                self._link.close()
                raise
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._owner, self._link, self._process)

    @classmethod
    def acquire(cls) -> ProcessServer:
        """Return the server of this process; one is started when there is none that runs.

        Raises:
            WorkerError: If it cannot be started.
        """
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
            if self._obituary is None:
                self._obituary = "was released"
            self._end()

    @property
    def alive(self) -> bool:
        """Whether the server runs, as far as is known without asking it."""
        return self._obituary is None and self._process.poll() is None

    def preload(
        self,
        tasks: Sequence[tuple[str, int]],
        assets: str,
        *,
        timeout: float,
        clutter: bool = False,
        images: bool = True,
    ) -> None:
        """Load the models of some tasks in the server, so that later workers share them.

        A scene that is not in the cache is compiled first.

        Args:
            tasks: Suite and id of each.
            assets: ``"lite"``, ``"libero"`` or a path to LIBERO's assets.
            timeout: In seconds. A server that misses it is killed, with all its workers.
            clutter: Whether the scenes are those with clutter.
            images: Whether the workers are going to draw.

        Raises:
            VlaGymError: What went wrong there: UnknownTaskError, AssetError, CompileError.
            ServerDied: If the server is gone, or missed the deadline.
            ServerTimeout: If another thread's request kept it busy until the deadline.
        """
        pairs = [(str(suite), int(task_id)) for suite, task_id in tasks]
        arguments = {"tasks": pairs, "assets": str(assets), "clutter": clutter, "images": images}
        _, control = self._ask("preload", arguments, _ONE_THREAD, (), timeout)
        control.close()

    def spawn(
        self,
        payload: bytes,
        fds: Sequence[int],
        environ: Mapping[str, str],
        *,
        timeout: float,
        target: str = WORKER,
    ) -> WorkerProcess:
        """Fork a worker that calls ``main(payload, fds)`` and ends when that returns.

        The worker sees the trainer's environment variables, working directory, ``sys.path`` and
        ``sys.argv`` as they are now. It ignores SIGINT.

        Args:
            payload: Passed on.
            fds: A few descriptors that it gets copies of, under other numbers.
            environ: Environment variables that differ from the trainer's.
            timeout: In seconds. A server that misses it is killed, with all its workers.
            target: ``"module:function"`` to call instead.

        Raises:
            ServerDied: If the server is gone, or missed the deadline.
            ServerTimeout: If another thread's request kept it busy until the deadline.
            WorkerError: If the server cannot fork.
        """
        pid, control = self._ask(
            "spawn", {"target": target, "payload": payload}, environ, fds, timeout
        )
        return WorkerProcess(self, pid, control)

    def check_usable(self) -> None:
        """Check that this process may use the server, as far as is known without asking it.

        Raises:
            ServerDied: If it is gone.
            WorkerError: In a fork of the trainer.
        """
        if os.getpid() != self._owner:
            raise WorkerError(
                f"This process server belongs to process {self._owner}; a process that was forked "
                "from it needs an environment of its own."
            )
        if self._obituary is not None:
            raise ServerDied(f"The process server {self.pid} {self._obituary}.")

    def _ask(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        fds: Sequence[int],
        timeout: float,
    ) -> tuple[Any, socket.socket]:
        """Send a request; return the answer and the socket that it came through."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(0.0, timeout)):
            raise ServerTimeout(
                f"The process server {self.pid} was busy with another request for {timeout:g} s."
            )
        try:
            self.check_usable()
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    request = (operation, surroundings(environ), arguments)
                    self._send(request, [theirs.fileno(), *fds], deadline)
                control.settimeout(max(0.001, deadline - time.monotonic()))
                answer = control.recv(LONGEST_ANSWER)
                if not answer:
                    self.bury(None, None)
            except BaseException:
                hang_up(control)  # a worker that nobody knows of is ended by that
                raise
        except TimeoutError as late:
            self.bury(f"did not answer {operation!r} within {timeout:g} s and was killed", late)
        except (BrokenPipeError, ConnectionResetError) as error:
            self.bury(None, error)
        except OSError as error:
            raise WorkerError(f"No request can be sent to the process server: {error}.") from error
        finally:
            self._lock.release()
        value, error_bytes = pickle.loads(answer)
        if error_bytes is not None:
            control.close()
            raise pickle.loads(error_bytes)
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
        if reason is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
        self._process.kill()
        code = self._process.wait()
        self._obituary = reason or f"is gone, with its workers (exit code {code})"
        self._end()
        raise ServerDied(f"The process server {self.pid} {self._obituary}.") from cause


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
    """Start the server with its end of the link.

    Raises:
        WorkerError: If the interpreter cannot be started.
    """
    # Whatever made our own imports work, a bare checkout or a changed sys.path, works there, too;
    # -P, because the working directory shall come first only if it does so here.
    checkout = str(Path(__file__).resolve().parents[2])
    here = surroundings({})["folder"] or os.sep
    paths = [os.path.join(here, path) for path in map(str, sys.path)]
    environ = {**os.environ, **_ONE_THREAD}
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, checkout]))
    numbers = [str(remote.fileno()), str(os.getpid())]
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "vla_gym.vector.server", *numbers],
            stdin=subprocess.DEVNULL,
            env=environ,
            pass_fds=[remote.fileno()],
            start_new_session=True,  # a Ctrl-C is for the trainer alone
        )
    except OSError as error:
        raise WorkerError(
            f"The process server cannot be started with {sys.executable!r}: {error}."
        ) from error


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
