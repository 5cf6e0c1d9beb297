"""One child process a system: started, asked with a deadline, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.cli.bench.procfs import pss_mb, session_pids
from vla_gym.errors import VlaGymError

if TYPE_CHECKING:
    from vla_gym.cli.bench.config import SystemSpec
    from vla_gym.cli.bench.systems import System

#: A start may build many environments on few cores, one after the other.
START_DEADLINE_S = 900.0
CALL_DEADLINE_S = 300.0
_CLOSE_DEADLINE_S = 20.0
_LOG_TAIL = 3000
#: Equal for all systems: one thread a worker, which also draws.
_ENVIRONMENT = {
    "LP_NUM_THREADS": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "MUJOCO_GL": "egl",
    "PYOPENGL_PLATFORM": "egl",
}
_system: System | None = None  # of a child process


class BenchError(VlaGymError, RuntimeError):
    """A system under measurement could not be started, failed or gave no answer in time."""


class Child:
    """A process that holds one system.

    It leads a session, so that a Ctrl-C at the terminal reaches the benchmark alone, and
    :meth:`close` finds everything that it has started. Its output goes to a file.

    Attributes:
        spec: The system.
        pid: Of the process.
        start_s: Seconds from the process's start to the first observation of every environment.
    """

    def __init__(self, spec: SystemSpec) -> None:
        """Start the process and build its system.

        Raises:
            BenchError: If the system cannot be built, or not in time.
        """
        self.spec, self.pid = spec, 0
        self._folder = tempfile.TemporaryDirectory(prefix="vla-gym-bench-")
        begin = time.perf_counter()
        # Libraries read their variables when they are loaded, so the process is born with them.
        os.environ.update(_ENVIRONMENT)
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_begin, initargs=(self._folder.name,)
        )
        try:
            self.pid = self._run("start", START_DEADLINE_S, os.getpid)
            self._run("build", START_DEADLINE_S, _build, spec)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - begin

    def __enter__(self) -> Child:
        """Return the child."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def call(self, name: str, *args: Any) -> Any:
        """Run a method of the system and return its result.

        Raises:
            BenchError: If the call failed, its process died or the deadline passed.
        """
        return self._run(name, CALL_DEADLINE_S, _call, name, *args)

    def _run(self, name: str, deadline_s: float, function: Any, *args: Any) -> Any:
        label = self.spec.name
        try:
            return self._pool.submit(function, *args).result(deadline_s)
        except TimeoutError as error:
            late = f"{label}: no answer to {name!r} within {deadline_s:.0f} s.\n{self._tail()}"
            raise BenchError(late) from error
        except BrokenProcessPool as error:
            died = f"{label}: its process died during {name!r}.\n{self._tail()}"
            raise BenchError(died) from error
        except VlaGymError as error:
            raise BenchError(f"{label}: {error}") from error
        except Exception as error:
            failed = f"{label}: {name!r} failed: {type(error).__name__}: {error}"
            raise BenchError(failed) from error

    def memory(self) -> dict[str, float]:
        """Return the memory (PSS) in MB of the largest worker and of all processes."""
        workers = max(pss_mb(pid) for pid in self.call("worker_pids"))
        return {"worker_mb": workers, "all_mb": sum(map(pss_mb, session_pids(self.pid)))}

    def close(self) -> None:
        """End the system and all its processes, whatever state they are in."""
        pids = set(session_pids(self.pid)) if self.pid else set()
        with contextlib.suppress(Exception):
            self._pool.submit(_call, "close").result(_CLOSE_DEADLINE_S)
        for pid in pids | set(session_pids(self.pid) if self.pid else ()):
            with contextlib.suppress(OSError):
                # A number that another process has got meanwhile is not of this session.
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def _tail(self) -> str:
        log = Path(self._folder.name) / "output.txt"
        return log.read_text(errors="replace")[-_LOG_TAIL:].strip() if log.is_file() else ""


def _begin(folder: str) -> None:
    os.setsid()
    os.chdir(folder)  # upstream writes into the working directory
    set_start_method("fork", force=True)  # as in a process that was not spawned itself
    with open("output.txt", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _build(spec: SystemSpec) -> None:
    global _system
    from vla_gym.cli.bench.systems import System

    _system = System(spec)


def _call(name: str, *args: Any) -> Any:
    return getattr(_system, name)(*args)
