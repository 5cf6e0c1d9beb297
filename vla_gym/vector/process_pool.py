"""Worker processes as the trainer sees them: commands out, events in, nothing waits for ever."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from vla_gym.errors import VlaGymError, WorkerError
from vla_gym.vector.pool import Event, Failure
from vla_gym.vector.process_server import ProcessServer
from vla_gym.vector.shared_memory import Layout, SharedArrays
from vla_gym.vector.worker import (
    ATTACH,
    CALL,
    DONE,
    FAILED,
    QUIT,
    RAISED,
    READY,
    RUN,
    WorkerSpec,
    pack,
    pack_object,
    unpack,
    unpack_object,
)
from vla_gym.vector.worker_process import ServerDied, WorkerHandle, describe_exit, socket_pair

_CLOSE_S = 5.0  # for a worker to close its environments
_KILL_S = 10.0  # for the kernel to end a killed process


class ProcessPool:
    """Workers that a :class:`~vla_gym.vector.process_server.ProcessServer` forks."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        blocks: Sequence[np.ndarray],
        *,
        environ: Callable[[int], Mapping[str, str]],
        prepare: Callable[[ProcessServer], None],
        step_timeout: float,
        start_timeout: float,
    ) -> None:
        """Start the workers; ``"ready"`` events tell when they are built.

        Args:
            specs: One per worker.
            blocks: Environment ids of each worker.
            environ: Environment variables of worker ``w``.
            prepare: Called with a new server before workers are forked from it.
            step_timeout: Seconds without progress after which a worker counts as hung.
            start_timeout: The same until its environments are built, and to its first answer.
        """
        self._specs, self._environ = specs, environ
        self._prepare, self._blocks = prepare, blocks
        # The message of nearly every step.
        self._run_all = [pack(RUN, block) for block in blocks]
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._owner = os.getpid()
        self._poller = select.poll()
        self._handles: dict[int, WorkerHandle] = {}
        self._by_fd: dict[int, int] = {}
        self._undelivered: list[Event] = []
        self._server: ProcessServer | None = None
        self._memory: SharedArrays | None = None
        self._memory_fd = os.memfd_create("vla-gym")
        self._attach = b""
        try:
            for worker in range(len(specs)):
                self._spawn(worker)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, in the order of the workers."""
        return tuple(handle.process.pid for _, handle in sorted(self._handles.items()))

    def attach(self, layout: Layout, *, same_step: bool) -> dict[str, np.ndarray]:
        """Share a table with the workers and with those that will replace them."""
        self._memory = SharedArrays(layout, self._memory_fd)
        self._attach = pack_object(ATTACH, (dict(layout), same_step))
        for handle in self._handles.values():
            with contextlib.suppress(OSError):  # its end is noticed with the first command
                handle.connection.send_bytes(self._attach)
        return self._memory.arrays

    def _progress(self, worker: int) -> int:
        return int(self._memory["progress"][worker]) if self._memory is not None else 0

    def _spawn(self, worker: int) -> None:
        for attempt in (1, 2):
            try:
                if self._server is None:
                    self._server = ProcessServer.acquire()
                    self._prepare(self._server)
                self._handles[worker] = self._fork(self._server, worker)
                break
            except ServerDied as error:
                # Its workers died with it; the next server is a new process.
                self._release()
                if attempt == 2:
                    raise WorkerError(f"The server of the workers died twice: {error}") from error
        handle = self._handles[worker]
        self._poller.register(handle.connection.fileno(), select.POLLIN)
        self._by_fd[handle.connection.fileno()] = worker

    def _fork(self, server: ProcessServer, worker: int) -> WorkerHandle:
        ours, theirs = socket_pair(self._step_timeout)
        with ours, theirs:
            process = server.spawn(
                cloudpickle.dumps(self._specs[worker]),
                [theirs.fileno(), self._memory_fd],
                self._environ(worker),
                timeout=self._start_timeout,
            )
            connection = Connection(ours.detach())
        if self._attach:
            with contextlib.suppress(OSError):
                connection.send_bytes(self._attach)
        now, progress = time.monotonic(), self._progress(worker)
        limits = self._step_timeout, self._start_timeout
        return WorkerHandle(connection, process, server, *limits, active_at=now, progress=progress)

    def run(
        self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any] | None = None
    ) -> None:
        """Have environments of a worker do what their rows say."""
        if ids is self._blocks[worker] and not each and not options:
            message = self._run_all[worker]
        else:
            message = pack(RUN, ids, options, flag=each)
        self._send(worker, message, "run", len(ids) if each else 1)

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of rows; the results come as an event."""
        message = pack_object(CALL, (list(ids), method, arguments))
        name = f"{method} {arguments[0][0]!r}" if method in ("call", "set_attr") else method
        self._send(worker, message, name, 1)

    def _send(self, worker: int, message: bytes, command: str, answers: int) -> None:
        handle = self._handles.get(worker)
        if handle is None:  # its failure is on the way to the caller
            return
        handle.command = command
        if not handle.outstanding:
            handle.active_at = time.monotonic()
        handle.outstanding += answers
        try:
            handle.connection.send_bytes(message)
        except OSError:
            self._undelivered.append(self._fail(worker, None))

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout`` seconds, or if nothing is under way.

        A worker that makes no progress within its deadline is killed and reported as failed.
        """
        if self._undelivered:
            events, self._undelivered = self._undelivered, []
            return events
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = self._next_deadline() - time.monotonic()
            if wait == float("inf") and end is None:
                return []  # nothing is under way: nobody would ever answer
            if end is not None:
                wait = min(wait, end - time.monotonic())
            ready = self._poller.poll(max(0.0, min(wait, 3600.0)) * 1e3)
            events = [self._receive(self._by_fd[fd]) for fd, _ in ready]
            if not events:
                events = self._expired()
            if events or (end is not None and time.monotonic() >= end):
                return events

    def _next_deadline(self) -> float:
        busy = [handle for handle in self._handles.values() if handle.busy]
        return min((handle.active_at + handle.limit for handle in busy), default=float("inf"))

    def _expired(self) -> list[Event]:
        now, events = time.monotonic(), []
        for worker, handle in list(self._handles.items()):
            if not handle.busy:
                continue
            progress = self._progress(worker)
            if progress != handle.progress:
                handle.progress, handle.active_at = progress, now
            elif now >= handle.active_at + handle.limit:
                what = f"made no progress for {handle.limit:g} s and was killed"
                events.append(self._fail(worker, what))
        return events

    def _receive(self, worker: int) -> Event:
        handle = self._handles[worker]
        try:
            message = handle.connection.recv_bytes()
        except (EOFError, OSError):
            return self._fail(worker, None)
        handle.active_at = time.monotonic()
        handle.progress = self._progress(worker)
        code, nothing = message[:1], np.empty(0, np.int32)
        if code == READY:
            handle.ready = True
            return Event("ready", worker, nothing, unpack_object(message))
        if code == FAILED:
            error, text = unpack_object(message)
            return self._fail(worker, f"raised an exception:\n{text.rstrip()}", error, raised=True)
        handle.answered = True
        if code == RAISED:
            error, ids, answers = unpack_object(message)
            handle.outstanding -= answers
            return Event("raised", worker, ids, error)
        handle.outstanding -= 1
        if code == DONE:
            _, ids, extras = unpack(message)
            return Event("done", worker, ids, extras or {})
        return Event("value", worker, nothing, unpack_object(message))

    def _fail(
        self,
        worker: int,
        reason: str | None,
        error: VlaGymError | None = None,
        *,
        raised: bool = False,
    ) -> Event:
        """Make sure that a worker is gone and say why."""
        handle = self._handles.pop(worker)
        fd = handle.connection.fileno()
        self._poller.unregister(fd)
        del self._by_fd[fd]
        handle.connection.close()
        code: int | None = None
        try:
            # A process that ended by itself says how; one that only closed its socket does not.
            if reason is None:
                code = handle.process.exit_code(2.0)
            if code is None:
                code = handle.process.kill(_KILL_S)
        except ServerDied:  # and the worker with it
            if handle.server is self._server:
                self._release()
            reason = reason or "is gone with the process server, which died"
        reason = reason or describe_exit(code)
        failure = Failure(reason, error, raised, handle.ready, handle.command)
        return Event("failed", worker, np.empty(0, np.int32), failure)

    def respawn(self, worker: int) -> None:
        """Start a worker again after it failed.

        Raises:
            WorkerError: If no process can be started.
        """
        try:
            self._spawn(worker)
        except TimeoutError as error:
            raise WorkerError(f"Worker {worker} could not be started again: {error}") from error

    def close(self) -> None:
        """End all workers: idle ones close their environments, others are killed."""
        if os.getpid() != self._owner:
            return  # a fork of the trainer: the workers are not ours
        handles, self._handles, self._by_fd = self._handles, {}, {}
        idle = {worker for worker, handle in handles.items() if not handle.busy}
        for worker in list(idle):
            try:
                handles[worker].connection.send_bytes(QUIT)
            except OSError:
                idle.discard(worker)
        end = time.monotonic() + _CLOSE_S
        for worker, handle in handles.items():
            # If the server fails here, its own end takes its workers with it.
            with contextlib.suppress(WorkerError):
                wait = end - time.monotonic()
                if worker not in idle or handle.process.exit_code(wait) is None:
                    handle.process.kill(_KILL_S)
            handle.connection.close()
        self._release()
        if self._memory is not None:
            self._memory.close()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1

    def _release(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.release()
