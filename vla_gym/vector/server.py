"""The process server: forks workers from a process that never touched OpenGL, CUDA or threads.

Started by :mod:`vla_gym.vector.process_server` as ``python -m vla_gym.vector.server FD PID``. It
loads compiled models once, so that all workers share their memory, and forks a worker on request.
It ends with the trainer, and takes its workers along:

* the trainer closes the link, or is gone: a timer looks every quarter of a second, also while a
  request is worked on, because a forked child of the trainer may hold the link open;
* the server itself is killed: the kernel then kills the workers.

No thread, no OpenGL, no torch, no libero and no robosuite in here: a fork would carry a broken
copy of them into each worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any, NoReturn, cast

from vla_gym.errors import VlaGymError, WorkerError
from vla_gym.vector import server_link
from vla_gym.vector.server_link import Context, Reply, Request

TRAINER_CHECK_S = 0.25
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Server:
    """Forks workers for one trainer."""

    def __init__(self, link: socket.socket, trainer: int) -> None:
        self._link = link
        self._poller = select.poll()
        self._poller.register(link, select.POLLIN)
        self._trainer = trainer
        self._pid = os.getpid()
        self._workers: set[int] = set()
        self._exit_codes: dict[int, int] = {}

    def serve(self) -> NoReturn:
        """Answer requests until the trainer says so or is gone."""
        # What a program that is started inherits from the trainer, blocked signals included.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, self._check_trainer)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.setitimer(signal.ITIMER_REAL, TRAINER_CHECK_S, TRAINER_CHECK_S)
        gc.disable()  # a collection writes to every object, and the pages would no longer be shared
        while True:
            self._poller.poll()
            message = server_link.receive(self._link)
            if message is None or message[0].operation == "end":
                self._end()
            request, fds = message
            if request.operation == "discard":
                self._reap(*request.arguments)
                continue
            try:
                reply = self._answer(request, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            try:
                server_link.send(self._link, reply)
            except OSError:
                self._end()

    def _answer(self, request: Request, fds: Sequence[int]) -> Reply:
        try:
            if request.operation == "spawn":
                assert request.context is not None
                pid = self._spawn(request.context, fds, *request.arguments)
                return Reply(request.number, pid, forked=True)
            if request.operation == "preload":
                assert request.context is not None
                self._preload(request.context, *request.arguments)
                return Reply(request.number)
            return Reply(request.number, self._exit_code(*request.arguments))
        except Exception as error:
            return Reply(request.number, error=_pickled(error))

    def _preload(
        self,
        context: Context,
        tasks: Sequence[tuple[str, int]],
        assets: str,
        clutter: bool = False,
        images: bool = True,
    ) -> None:
        from vla_gym.vector.preload import preload

        _enter(context)
        preload(tasks, assets, clutter=clutter, images=images)
        gc.collect()

    def _spawn(self, context: Context, fds: Sequence[int], target: str, payload: bytes) -> int:
        _flush()
        # The collector of a worker leaves alone what exists now, so that it stays shared.
        gc.freeze()
        told, tell = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                os.close(told)
                self._become_worker(context, fds, target, payload, tell)
            os.close(tell)
            tell = -1
            os.read(told, 1)  # it has its own group and ends with us, or it has ended already
        finally:
            for fd in (told, tell):
                if fd >= 0:
                    os.close(fd)
        self._workers.add(pid)
        self._exit_codes.pop(pid, None)
        return pid

    def _become_worker(
        self, context: Context, fds: Sequence[int], target: str, payload: bytes, tell: int
    ) -> NoReturn:
        """Run a worker; never returns, not even by an exception."""
        code = 1
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._pid:
                os._exit(1)  # the server died before the kernel knew what we want
            os.setpgid(0, 0)
            os.close(tell)
            self._link.close()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            gc.enable()
            _enter(context)
            if "numpy" in sys.modules:  # the standard library's generator does so by itself
                sys.modules["numpy"].random.seed()
            _resolve(target)(payload, list(fds))
            code = 0
        except SystemExit as leave:
            if isinstance(leave.code, int | None):
                code = leave.code or 0
            else:
                sys.stderr.write(f"{leave.code}\n")  # as the interpreter does
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(code & 0xFF)

    def _exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker (negative: signal), None while it runs."""
        if pid in self._workers and _has_ended(pid):
            self._reap(pid)
        if pid not in self._workers and pid not in self._exit_codes:
            raise WorkerError(f"No worker of this process server has the process id {pid}.")
        return self._exit_codes.get(pid)

    def _reap(self, pid: int) -> None:
        # Until it is waited for, nobody else can get its process id.
        server_link.kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._workers.discard(pid)
        self._exit_codes[pid] = os.waitstatus_to_exitcode(status)

    def _check_trainer(self, *_: Any) -> None:
        # A poller of its own: this may interrupt the wait for a request.
        poller = select.poll()
        poller.register(self._link, 0)
        hung_up = any(event & select.POLLHUP for _, event in poller.poll(0))
        if hung_up or os.getppid() != self._trainer:
            self._end()

    def _end(self) -> NoReturn:
        """Kill the workers, wait for their end and leave."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for pid in self._workers:
            server_link.kill_group(pid)
        for pid in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a broken pipe
            stream.flush()


def _has_ended(pid: int) -> bool:
    """Tell whether a child has ended, without waiting for it and without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _enter(context: Context) -> None:
    """Take over the trainer's surroundings as they are now."""
    if dict(os.environ) != dict(context.environ):
        os.environ.clear()
        os.environ.update(context.environ)
    if context.folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(context.folder)
    sys.path[:] = context.sys_path
    sys.argv[:] = context.argv
    importlib.invalidate_caches()


def _resolve(target: str) -> Callable[[bytes, list[int]], None]:
    """Return the function named by ``"module:function"``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _pickled(error: Exception) -> bytes:
    """Pickle an exception of ours; any other, or one that does not survive it, as WorkerError."""
    if isinstance(error, VlaGymError):
        with contextlib.suppress(Exception):
            data = pickle.dumps(error)
            pickle.loads(data)
            return data
    text = "".join(traceback.format_exception(error))
    return pickle.dumps(WorkerError(f"The process server failed:\n{text}"))


def main() -> NoReturn:
    """Serve the trainer ``sys.argv[2]`` over the descriptor ``sys.argv[1]``."""
    fd, trainer = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(fd, False)
    with contextlib.suppress(Exception):  # stderr may be closed
        faulthandler.enable()  # a worker that aborts shows where
    with contextlib.suppress(Exception):
        cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)  # lost by SIGKILL else
    Server(socket.socket(fileno=fd), trainer).serve()


if __name__ == "__main__":
    main()
