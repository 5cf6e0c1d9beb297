"""The trainer's handle on the process server that forks its workers."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vla_gym.errors import WorkerError
from vla_gym.vector import server_link, server_start
from vla_gym.vector.server_link import Context, Reply, Request

WORKER = "vla_gym.vector.worker:main"
# How long the server may take to answer a question that needs no work; on a loaded machine it may
# not be scheduled for seconds.
ANSWER_S = 10.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05


class ServerDied(WorkerError):
    """The process server is gone, and all of its workers with it."""


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
        self._running: set[int] = set()
        self._exit_codes: dict[int, int] = {}
        # One request at a time. Reentrant, because the garbage collector may close an environment,
        # and so ask for something, while this thread waits for an answer.
        self._lock = threading.RLock()
        self._number = 0
        self._waiting: set[int] = set()
        self._replies: dict[int, Reply] = {}
        self._obituary: str | None = None
        self._link, remote = server_link.new_pair()
        with remote:
            try:
                self._process = server_start.start(remote)
            except BaseException:
                self._link.close()
                raise
        self.pid = self._process.pid
        self._end = weakref.finalize(self, server_start.end, self._owner, self._link, self._process)

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
        self._ask(
            "preload",
            (pairs, str(assets), clutter, images),
            timeout,
            context=server_start.trainer_context(server_start.ONE_THREAD),
        )

    def spawn(
        self,
        payload: bytes,
        fds: Sequence[int],
        environ: Mapping[str, str],
        *,
        timeout: float,
        target: str = WORKER,
    ) -> int:
        """Fork a worker that calls ``main(payload, fds)`` and ends when that returns.

        The worker sees the trainer's environment variables, working directory, ``sys.path`` and
        ``sys.argv`` as they are now. It ignores SIGINT.

        Args:
            payload: Passed on.
            fds: Descriptors that it gets copies of, under other numbers; at most 250.
            environ: Environment variables that differ from the trainer's.
            timeout: In seconds. A server that misses it is killed, with all its workers.
            target: ``"module:function"`` to call instead.

        Returns:
            The worker's process id.

        Raises:
            ServerDied: If the server is gone, or missed the deadline.
            ServerTimeout: If another thread's request kept it busy until the deadline.
            WorkerError: If the server cannot fork, or there are too many descriptors.
        """
        if len(fds) > server_link.MAX_FDS:
            raise WorkerError(
                f"A worker can be given {server_link.MAX_FDS} descriptors, got {len(fds)}."
            )
        context = server_start.trainer_context(environ)
        pid: int = self._ask("spawn", (target, payload), timeout, context=context, fds=fds)
        self._exit_codes.pop(pid, None)
        self._running.add(pid)
        return pid

    def kill(self, pid: int, *, timeout: float) -> int | None:
        """SIGKILL a worker, stopped or not, with the processes of its group, and reap it.

        The signal does not need the server, so this ends a worker even while the server is busy.

        Args:
            pid: A worker of this server.
            timeout: Seconds to wait for its end and for the server's answer.

        Returns:
            Its exit code, negative for a signal; None if it is not known within the deadline.

        Raises:
            ServerDied: If the server is gone, its workers are dead, too.
            WorkerError: If this server never had such a worker.
        """
        self._check_usable()
        if pid in self._running:
            # It stays a child of the server until its exit code is asked for: no other process
            # can have got its id.
            server_link.kill_group(pid)
        try:
            return self._wait(pid, timeout, grace=0.0)
        except ServerTimeout:
            return None

    def exit_code(self, pid: int, *, timeout: float) -> int | None:
        """Wait for the end of a worker and reap it.

        Args:
            pid: A worker of this server.
            timeout: In seconds; 0 just looks.

        Returns:
            Its exit code, negative for a signal; None if it still runs after that time.

        Raises:
            ServerDied: If the server is gone, its workers are dead, too.
            ServerTimeout: If the server takes 10 s longer than ``timeout`` to answer.
            WorkerError: If this server never had such a worker.
        """
        self._check_usable()
        return self._wait(pid, timeout, grace=ANSWER_S)

    def _wait(self, pid: int, timeout: float, *, grace: float) -> int | None:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE_S
        while True:
            if pid in self._exit_codes:
                return self._exit_codes[pid]
            if pid not in self._running:
                raise WorkerError(f"The process server {self.pid} has no worker {pid}.")
            left = max(0.0, deadline - time.monotonic())
            code: int | None = self._ask("exit_code", (pid,), left + grace, vital=False)
            if code is not None:
                self._exit_codes[pid] = code
                self._running.discard(pid)
                return code
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE_S)

    def _check_usable(self) -> None:
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
        arguments: tuple[Any, ...],
        timeout: float,
        *,
        context: Context | None = None,
        fds: Sequence[int] = (),
        vital: bool = True,
    ) -> Any:
        """Send a request and return the answer's value; ``vital``: kill a server that is late."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(0.0, timeout)):
            raise ServerTimeout(
                f"The process server {self.pid} was busy with another request for {timeout:g} s."
            )
        try:
            self._check_usable()
            self._number += 1
            number = self._number
            self._waiting.add(number)
            try:
                self._send(Request(number, operation, arguments, context), fds, deadline)
                reply = self._receive(number, deadline)
            except ServerTimeout as late:
                message = f"did not answer {operation!r} within {timeout:g} s"
                if vital:
                    self._bury(f"{message} and was killed", late)
                raise ServerTimeout(f"The process server {self.pid} {message}.") from late
            finally:
                self._waiting.discard(number)
        finally:
            self._lock.release()
        if reply.error is not None:
            raise pickle.loads(reply.error)
        return reply.value

    def _send(self, request: Request, fds: Sequence[int], deadline: float) -> None:
        self._link.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            server_link.send(self._link, request, fds)
        except TimeoutError as error:
            raise ServerTimeout from error
        except (BrokenPipeError, ConnectionResetError) as error:
            self._bury(None, error)
        except OSError as error:
            raise WorkerError(f"No request can be sent to the process server: {error}.") from error

    def _receive(self, number: int, deadline: float) -> Reply:
        """Wait for a reply; those of other requests are kept or, if given up, cleaned away."""
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        while number not in self._replies:
            self._check_usable()
            left = max(0.0, deadline - time.monotonic())
            if not poller.poll(1000 * left):
                raise ServerTimeout
            try:
                message = server_link.receive(self._link)
            except OSError as error:
                self._bury(f"sent an answer that cannot be read ({error}) and was killed", error)
            if message is None:
                self._bury(None, None)
            reply: Reply = message[0]
            if reply.number in self._waiting:
                self._replies[reply.number] = reply
            elif reply.forked:
                # Whoever asked for this worker was interrupted, e.g. by Ctrl-C, and never got it.
                self._send(Request(0, "discard", (reply.value,)), (), deadline)
        return self._replies.pop(number)

    def _bury(self, reason: str | None, cause: BaseException | None) -> NoReturn:
        """Make sure that the server is dead, say so to all later callers, and raise it."""
        if reason is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(server_start.EXIT_S)
        self._process.kill()
        self._process.wait()
        code = self._process.returncode
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
