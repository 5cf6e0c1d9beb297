"""One child process a system: started, asked over pipes with a deadline, ended with all its own.

Run as a program (``python -m vla_gym.cli.bench.processes FD_IN FD_OUT``), this is the child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.cli.bench.procfs import pss_mb, session_pids
from vla_gym.errors import VlaGymError

if TYPE_CHECKING:
    from vla_gym.cli.bench.systems import System, SystemSpec

#: A start may build many environments on few cores, one after the other.
START_DEADLINE_S = 900.0
CALL_DEADLINE_S = 300.0
_CLOSE_DEADLINE_S = 20.0
_LOG_TAIL = 3000


class BenchError(VlaGymError, RuntimeError):
    """A system under measurement could not be started, failed or gave no answer in time."""


class Child:
    """A process that holds one system.

    It leads a session, so that a Ctrl-C at the terminal reaches the benchmark alone, and
    :meth:`close` finds everything that it has started. Its output goes to a file.

    Attributes:
        spec: The system.
        start_s: Seconds from the process's start to the first observation of every environment.
    """

    def __init__(self, spec: SystemSpec, environ: Mapping[str, str]) -> None:
        """Start the process and build its system.

        Args:
            spec: What to run.
            environ: Additional environment variables, e.g. thread counts.

        Raises:
            BenchError: If the system cannot be built, or not in time.
        """
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix="vla-gym-bench-")
        self._log = Path(self._folder.name) / "output.txt"
        child_in, own_out = os.pipe()
        own_in, child_out = os.pipe()
        begin = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(child_in), str(child_out)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(child_in, child_out),
                cwd=self._folder.name,
                env={**_base_environment(), **environ},
                start_new_session=True,
            )
        os.close(child_in)
        os.close(child_out)
        self._to_child = Connection(own_out, readable=False)
        self._from_child = Connection(own_in, writable=False)
        self._pidfd = os.pidfd_open(self._process.pid)
        try:
            self.call("build", spec, deadline_s=START_DEADLINE_S)
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

    def call(self, name: str, *args: Any, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """Run a method of the system and return its result.

        Raises:
            BenchError: If the call failed, its process died or the deadline passed.
        """
        label = self.spec.name
        try:
            self._to_child.send((name, args))
            # Workers that the system has forked hold the pipe too: its end does not show a death.
            if not wait([self._from_child, self._pidfd], deadline_s):
                late = f"{label}: no answer to {name!r} within {deadline_s:.0f} s."
                raise BenchError(f"{late}\n{self._tail()}")
            if not self._from_child.poll():
                raise BenchError(f"{label}: its process died during {name!r}.\n{self._tail()}")
            kind, result = self._from_child.recv()
        except (EOFError, OSError) as error:
            died = f"{label}: its process died during {name!r}.\n{self._tail()}"
            raise BenchError(died) from error
        if kind == "result":
            return result
        detail = result if kind == "mistake" else f"{name!r} failed:\n{result}"
        raise BenchError(f"{label}: {detail}")

    def memory(self) -> dict[str, float]:
        """Return the memory (PSS) in MB of the largest worker and of all processes."""
        workers = max(pss_mb(pid) for pid in self.call("worker_pids"))
        every = sum(pss_mb(pid) for pid in session_pids(self._process.pid))
        return {"worker_mb": workers, "all_mb": every}

    def close(self) -> None:
        """End the system and all its processes, whatever state they are in."""
        if self._to_child.closed:
            return
        pids = session_pids(self._process.pid)
        self._to_child.close()  # the child leaves at the end of its input
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_DEADLINE_S)
        for pid in {*pids, *session_pids(self._process.pid)}:
            with contextlib.suppress(OSError):
                # A number that another process has got meanwhile is not of this session.
                if os.getsid(pid) == self._process.pid:
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._from_child.close()
        os.close(self._pidfd)
        self._folder.cleanup()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()


def _base_environment() -> dict[str, str]:
    """Return this process's environment, with EGL and an import path that also finds a checkout."""
    root = Path(__file__).resolve().parents[3]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "MUJOCO_GL": "egl",
        "PYOPENGL_PLATFORM": "egl",
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
    }


def main(fd_in: int, fd_out: int) -> None:
    """Build a system and run its methods as asked, until the input ends."""
    commands = Connection(fd_in, writable=False)
    answers = Connection(fd_out, readable=False)
    system: System | None = None
    try:
        while True:
            name, args = commands.recv()
            try:
                result: Any = None
                if name == "build":
                    from vla_gym.cli.bench.systems import make_system

                    system = make_system(*args)
                else:
                    result = getattr(system, name)(*args)
            except VlaGymError as error:
                answers.send(("mistake", str(error)))
            except Exception:
                answers.send(("exception", traceback.format_exc()))
            else:
                answers.send(("result", result))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        if system is not None:
            with contextlib.suppress(Exception):
                system.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
