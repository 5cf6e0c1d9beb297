"""The process server: forks workers from a process that never touched CUDA or threads.

:mod:`~vla_gym.vector.processes.client` starts it as a program. It calls functions that load things,
so that all workers share their memory, and forks a worker on request.

A request is one packet on the link, with descriptors beside it: a socket for the answer, a memory
file that holds the pickled request, and those that a worker is given. The socket of a worker's
request stays open as long as the trainer wants the worker: it brings the process id, then the exit
code, and when the trainer shuts it down the worker is killed and reaped.

The server ends with the trainer, and takes its workers along:

* the trainer closes the link, or is gone: a timer looks every quarter of a second, also while
  things are loaded, because a forked child of the trainer may hold the link open;
* the server itself is killed: the kernel then kills the workers.

No thread at work, no torch, no libero and no robosuite in here, and OpenGL only where
``sim.rendering.fork_safety`` allows it: a fork would carry a broken copy of them into each worker.
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
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import Any, NoReturn, cast

from vla_gym.errors import VlaGymError, WorkerError

LONGEST_ANSWER = 1 << 20  # bytes, of one packet to the trainer
MAX_FDS = 253  # that Linux lets travel with one packet
TRAINER_CHECK_S = 0.25
_LONGEST_TEXT = 50_000  # of a traceback, in characters: an answer is one packet
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Server:
    """Forks workers for one trainer.

    Attributes:
        workers: Process ids of those that are not reaped yet, with the sockets to the trainer.
    """

    def __init__(self, link: socket.socket, trainer: int) -> None:
        self.workers: dict[int, socket.socket] = {}
        self._link, self._trainer, self._pid = link, trainer, os.getpid()
        self._reported: set[int] = set()  # workers whose exit code has been sent
        # A signal makes it readable: the timer's, or that of a worker that has ended.
        self._wakeup, wakeup = socket.socketpair()
        for end in (self._wakeup, wakeup):
            end.setblocking(False)
        self._wakeup_writer = wakeup

    def serve(self) -> NoReturn:
        """Answer requests until the trainer says so or is gone."""
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        # What a program that is started inherits from the trainer, blocked signals included.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGALRM, lambda *_: self._check_trainer())
        for number in (signal.SIGALRM, signal.SIGCHLD):
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.setitimer(signal.ITIMER_REAL, TRAINER_CHECK_S, TRAINER_CHECK_S)
        gc.disable()  # a collection writes to every object, and the pages would no longer be shared
        while True:
            poller = select.poll()
            for end in (self._link, self._wakeup, *self.workers.values()):
                poller.register(end, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
                self._report_ends()
            for pid, control in list(self.workers.items()):
                if control.fileno() in ready:  # the trainer never writes to it, it shuts it down
                    self._discard(pid)
            if self._link.fileno() in ready:
                self._answer()

    def _answer(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._link, 1, MAX_FDS)
        if not packet:
            self.end()
        for fd in fds:
            os.set_inheritable(fd, False)
        control, answer = socket.socket(fileno=fds[0]), None
        try:
            with open(fds[1], "rb") as file:
                file.seek(0)
                surroundings, target, arguments, fork = pickle.load(file)
            if fork:
                answer = self._spawn(control, surroundings, target, (arguments, fds[2:]))
                self.workers[answer] = control
            else:
                _enter(surroundings)
                _function(target)(**arguments)
                gc.collect()
            message = pickle.dumps(answer)
        except Exception as error:
            text = "".join(traceback.format_exception(error))[-_LONGEST_TEXT:]
            failure = WorkerError(f"The process server failed:\n{text}")
            message = pickle_error(error if isinstance(error, VlaGymError) else failure, failure)
        finally:
            for fd in fds[2:]:
                os.close(fd)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            control.send(message)
        if answer is None:
            control.close()

    def _spawn(self, control: socket.socket, *job: Any) -> int:
        """Fork a worker, see :meth:`_become_worker`; return its process id."""
        _flush()
        # The collector of a worker leaves alone what exists now, so that it stays shared.
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self._become_worker(control, *job)
        with contextlib.suppress(OSError):  # it has done so, or has ended already
            os.setpgid(pid, pid)
        return pid

    def _become_worker(
        self,
        control: socket.socket,
        surroundings: dict[str, Any],
        target: str,
        arguments: tuple[bytes, list[int]],
    ) -> NoReturn:
        """Run a worker; never returns, not even by an exception."""
        code = 1
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._pid:
                os._exit(1)  # the server died before the kernel knew what we want
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGALRM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            for end in (self._link, self._wakeup, self._wakeup_writer, control):
                end.close()
            for end in self.workers.values():
                end.close()
            gc.enable()
            _enter(surroundings)
            if "numpy" in sys.modules:  # the standard library's generator does so by itself
                sys.modules["numpy"].random.seed()
            _function(target)(*arguments)
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

    def _report_ends(self) -> None:
        """Send the exit codes (negative: signals) of workers that have ended."""
        for pid in self.workers.keys() - self._reported:
            # Until it is waited for, nobody else can get its process id: the trainer, too, may
            # signal it as long as it holds the socket.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                kill_group(pid)  # what it has started goes with it
                code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                self._reported.add(pid)
                with contextlib.suppress(OSError):
                    self.workers[pid].send(pickle.dumps(code))

    def _discard(self, pid: int) -> None:
        kill_group(pid)
        os.waitpid(pid, 0)
        self.workers.pop(pid).close()
        self._reported.discard(pid)

    def _check_trainer(self) -> None:
        # A poller of its own: this may interrupt the wait for a request.
        poller = select.poll()
        poller.register(self._link, 0)
        hung_up = any(event & select.POLLHUP for _, event in poller.poll(0))
        if hung_up or os.getppid() != self._trainer:
            self.end()

    def end(self) -> NoReturn:
        """Kill the workers, wait for their end and leave."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for pid in self.workers:
            kill_group(pid)
        for pid in self.workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(0)


def kill_group(pid: int) -> None:
    """SIGKILL a worker, stopped or not, and the processes that it has started in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def hang_up(end: socket.socket) -> None:
    """Shut a socket down and close it."""
    # Closing alone would say nothing while a forked child of the trainer holds the socket, too.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def pickle_error(error: Exception, otherwise: Exception) -> bytes:
    """Pickle an exception, or, if it does not survive that, another one."""
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    return pickle.dumps(otherwise)


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a broken pipe
            stream.flush()


def surroundings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what a worker takes over of this process, with some environment variables changed."""
    try:
        folder: str | None = os.getcwd()
    except OSError:
        folder = None
    return {
        "environ": {**os.environ, **environ},
        "folder": folder,
        "path": [str(path) for path in sys.path],
        "argv": [str(argument) for argument in sys.argv],
    }


def _enter(surroundings: dict[str, Any]) -> None:
    """Take over the trainer's environment variables, folder, path and arguments of now."""
    os.environ.clear()
    os.environ.update(surroundings["environ"])
    if surroundings["folder"] is not None:
        with contextlib.suppress(OSError):
            os.chdir(surroundings["folder"])
    sys.path[:] = surroundings["path"]
    sys.argv[:] = surroundings["argv"]
    importlib.invalidate_caches()


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
