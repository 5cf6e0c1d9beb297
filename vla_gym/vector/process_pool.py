"""Worker processes as the trainer sees them: commands out, events in, nothing waits for ever."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vla_gym.errors import VlaGymError, WorkerError
from vla_gym.vector.processes.client import ProcessServer, ServerDied, WorkerProcess
from vla_gym.vector.processes.interrupts import Interrupts
from vla_gym.vector.shared_memory import Layout, map_arrays
from vla_gym.vector.worker import Event, Failure, WorkerSpec, packed

_PRELOAD = "vla_gym.vector.preload:preload"
_CLOSE_S = 5.0  # for a worker to close its environments
_ABORT_S = 1.0  # for a hanging worker to write where it is
_KILL_S = 10.0  # for the kernel to end a killed process


@dataclass
class WorkerHandle:
    """A worker process: how to reach it, and what it has been told."""

    connection: Connection
    process: WorkerProcess
    active_at: float
    progress: int
    limit: float  # seconds that it may go without progress
    ready: bool = False
    outstanding: int = 1  # answers that are to come: first that it is ready
    command: str = "start"


class ProcessPool:
    """Processes that run ``vla_gym.vector.worker.main``; see :class:`~vla_gym.vector.pool.Pool`."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        interrupts: Interrupts,
        *,
        scenes: Mapping[str, Any] | None,
        step_timeout: float,
        start_timeout: float,
    ) -> None:
        """Start the workers; ``"ready"`` events tell when they are built.

        Args:
            specs: One per worker.
            interrupts: Tells when a wait may be interrupted.
            scenes: Arguments of ``vector.preload.preload``, which a new server calls before workers
                are forked from it; None: it is not called.
            step_timeout: Seconds without progress after which a worker counts as hung.
            start_timeout: The same until its environments are built, and to its first answer.
        """
        self.blocks = [np.array(spec.env_ids) for spec in specs]
        self._specs, self._scenes, self._interrupts = specs, scenes, interrupts
        # The message of nearly every step.
        self._run_all = [pickle.dumps(("run", list(spec.env_ids), {}, False)) for spec in specs]
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._poller = select.poll()
        self._handles: dict[int, WorkerHandle] = {}
        self._server: ProcessServer | None = None
        self._columns: dict[str, np.ndarray] = {}
        self._memory_fd = os.memfd_create("vla-gym")
        self._attach = b""
        try:
            for worker in range(len(specs)):
                self.start(worker)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, in the order of the workers."""
        return tuple(handle.process.pid for _, handle in sorted(self._handles.items()))

    def attach(self, layout: Layout, *, same_step: bool) -> dict[str, np.ndarray]:
        """Share a table with the workers and with those that will replace them."""
        self._columns = map_arrays(layout, self._memory_fd)
        self._attach = pickle.dumps(("attach", dict(layout), same_step))
        for handle in self._handles.values():
            with contextlib.suppress(OSError):  # its end is noticed with the first command
                handle.connection.send_bytes(self._attach)
        return self._columns

    def _progress(self, worker: int) -> int:
        return int(self._columns["progress"][worker]) if self._columns else 0

    def start(self, worker: int) -> None:
        """Start a worker, at first or after it failed.

        Raises:
            WorkerError: If no process can be started.
        """
        for attempt in (1, 2):
            try:
                if self._server is None:
                    self._server = ProcessServer.acquire()
                    if self._scenes is not None:
                        self._server.load(_PRELOAD, timeout=self._start_timeout, **self._scenes)
                self._handles[worker] = self._fork(self._server, worker)
                break
            except ServerDied as error:
                # Its workers died with it; the next server is a new process.
                self._release()
                if attempt == 2:
                    raise WorkerError(f"The server of the workers died twice: {error}") from error
        self._poller.register(self._handles[worker].connection, select.POLLIN)

    def _fork(self, server: ProcessServer, worker: int) -> WorkerHandle:
        spec = self._specs[worker]
        environ = {} if spec.device is None else {"MUJOCO_EGL_DEVICE_ID": str(spec.device)}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # However long a worker may stop in the middle of a message.
            limit = struct.pack("ll", int(self._step_timeout) + 1, 0)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, limit)
            process = server.spawn(
                "vla_gym.vector.worker:main",
                packed(spec, "The environments"),
                [theirs.fileno(), self._memory_fd],
                environ,
                timeout=self._start_timeout,
            )
            connection = Connection(ours.detach())
        if self._attach:
            with contextlib.suppress(OSError):
                connection.send_bytes(self._attach)
        now, progress = time.monotonic(), self._progress(worker)
        return WorkerHandle(connection, process, now, progress, self._start_timeout)

    def run(self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any]) -> None:
        """Have environments of a worker do what their rows say, with reset options by id."""
        if ids is self.blocks[worker] and not each and not options:
            message = self._run_all[worker]
        else:
            message = pickle.dumps(("run", ids.tolist(), options, each))
        self._send(worker, message, "run", len(ids) if each else 1)

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of rows; the results come as an event."""
        message = packed(("call", list(ids), method, arguments), "These arguments")
        name = f"{method} {arguments[0][0]!r}" if method in ("call", "set_attr") else method
        self._send(worker, message, name, 1)

    def _send(self, worker: int, message: bytes, command: str, answers: int) -> None:
        handle = self._handles[worker]
        handle.command = command
        if not handle.outstanding:
            handle.active_at = time.monotonic()
        handle.outstanding += answers
        with contextlib.suppress(OSError):  # poll() notices its end, or that it hangs
            handle.connection.send_bytes(message)

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout`` seconds, or if nothing is under way.

        A worker that makes no progress within its deadline is killed and reported as failed.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            busy = [handle for handle in self._handles.values() if handle.outstanding]
            deadline = min((handle.active_at + handle.limit for handle in busy), default=inf)
            wait = deadline - time.monotonic()
            if wait == inf and end is None:
                return []  # nothing is under way: nobody would ever answer
            if end is not None:
                wait = min(wait, end - time.monotonic())
            found = self._interrupts.wait(self._poller.poll, max(0.0, min(wait, 3600.0)) * 1e3)
            fds = {fd for fd, _ in found}
            ready = [w for w, h in self._handles.items() if h.connection.fileno() in fds]
            events = [self._receive(worker) for worker in ready]
            if not events or time.monotonic() >= deadline:  # one may hang while others answer
                events += self._expired()
            if events or (end is not None and time.monotonic() >= end):
                return events

    def _expired(self) -> list[Event]:
        now, events = time.monotonic(), []
        for worker, handle in list(self._handles.items()):
            if not handle.outstanding:
                continue
            progress = self._progress(worker)
            if progress != handle.progress:
                handle.progress, handle.active_at = progress, now
            elif now >= handle.active_at + handle.limit:
                what = f"made no progress for {handle.limit:g} s and was killed"
                with contextlib.suppress(ServerDied):
                    handle.process.abort(_ABORT_S)  # to stderr, for whoever looks for the cause
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
        event = Event(*pickle.loads(message))
        if event.kind == "failed":
            error, text = event.value
            return self._fail(worker, f"raised an exception:\n{text.rstrip()}", error, raised=True)
        handle.outstanding -= event.answers
        if handle.ready:
            # Only now: the first image may wait for drawing code to be compiled, by all workers.
            handle.limit = self._step_timeout
        handle.ready = True
        return event

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
        self._poller.unregister(handle.connection)
        handle.connection.close()
        code: int | None = None
        try:
            # A process that ended by itself says how; one that only closed its socket does not.
            code = handle.process.exit_code(2.0) if reason is None else None
            if code is None:
                code = handle.process.kill(_KILL_S)
        except ServerDied:  # and the worker with it
            if handle.process.server is self._server:
                self._release()
            reason = reason or "is gone with the process server, which died"
        reason = reason or _describe_exit(code)
        failure = Failure(reason, error, raised, handle.ready, handle.command)
        return Event("failed", worker, (), failure)

    def close(self) -> None:
        """End all workers: idle ones close their environments, others are killed."""
        if self._interrupts.in_fork:
            return  # a fork of the trainer: the workers are not ours
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            with contextlib.suppress(OSError):
                if not handle.outstanding:
                    handle.connection.send_bytes(pickle.dumps(("quit",)))
        end = time.monotonic() + _CLOSE_S
        for handle in handles.values():
            # If the server fails here, its own end takes its workers with it.
            with contextlib.suppress(WorkerError):
                wait = end - time.monotonic()
                if handle.outstanding or handle.process.exit_code(wait) is None:
                    handle.process.kill(_KILL_S)
            handle.connection.close()
        self._release()
        self._columns.clear()  # the memory is freed when the last view of it is gone
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1

    def _release(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.release()


def _describe_exit(code: int | None) -> str:
    """Say how a process ended, by its exit code (negative: signal)."""
    if code is None:
        return "is gone"
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), -code)
        return f"was killed by signal {name}"
    return f"left with exit code {code}"
