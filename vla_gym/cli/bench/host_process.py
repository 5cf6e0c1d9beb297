"""A child process that runs one system under measurement, seen from the benchmark."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vla_gym.cli.bench.procfs import Process, cpu_seconds, kill_all, process_tree, pss_mb
from vla_gym.cli.bench.spec import CALL_DEADLINE_S, Contender
from vla_gym.errors import VlaGymError

#: A start may build many environments on few cores, one after the other.
START_DEADLINE_S = 900.0
_CLOSE_DEADLINE_S = 20.0
_LOG_TAIL = 3000


class BenchError(VlaGymError, RuntimeError):
    """A system under measurement could not be started, failed or gave no answer in time."""


class HostProcess:
    """Handle of ``python -m vla_gym.cli.bench.host``: one system in a process of its own.

    The process leads a session, so that a Ctrl-C at the terminal reaches the benchmark alone;
    :meth:`close` ends it and everything that it has started.

    Attributes:
        contender: What it runs.
        start_s: Seconds from the process's start to the first observation of every environment.
    """

    def __init__(self, contender: Contender, environ: Mapping[str, str]) -> None:
        """Start the process and let it build its system; :meth:`wait_started` waits for it.

        Args:
            contender: What to run.
            environ: Additional environment variables, e.g. thread counts.
        """
        self.contender = contender
        self.start_s = float("nan")
        self._folder = tempfile.TemporaryDirectory(prefix="vla-gym-bench-")
        self._log = Path(self._folder.name) / "output.txt"
        workdir = Path(self._folder.name) / "work"
        workdir.mkdir()
        child_in, own_out = os.pipe()
        own_in, child_out = os.pipe()
        self._begin = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vla_gym.cli.bench.host", str(child_in), str(child_out)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(child_in, child_out),
                cwd=workdir,
                env={**_base_environment(), **environ},
                start_new_session=True,
            )
        os.close(child_in)
        os.close(child_out)
        self._to_child = Connection(own_out, readable=False)
        self._from_child = Connection(own_in, writable=False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._tree: list[Process] = []
        self.send("build", contender)

    def wait_started(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Wait until every environment has given its first observation.

        Raises:
            BenchError: If the system cannot be built, or not in time.
        """
        self.receive(deadline_s)
        self.start_s = time.perf_counter() - self._begin
        self.refresh_tree()

    def send(self, name: str, *args: Any) -> None:
        """Ask for a method of the driver; :meth:`receive` returns its result."""
        self._pending = name
        try:
            self._to_child.send((name, args))
        except OSError as error:
            raise BenchError(self._died(name)) from error

    def receive(self, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """Wait for the result of the last :meth:`send`.

        Raises:
            BenchError: If the call failed, its process died or the deadline passed.
        """
        name = self._pending
        try:
            # Workers that the system has forked hold the pipe too: its end does not show a death.
            ready = wait([self._from_child, self._pidfd], deadline_s)
            if not ready:
                raise BenchError(
                    f"{self.contender.label}: no answer to {name!r} within {deadline_s:.0f} s."
                    f"\n{self._tail()}"
                )
            if not self._from_child.poll():
                raise BenchError(self._died(name))
            kind, result = self._from_child.recv()
        except (EOFError, OSError) as error:
            raise BenchError(self._died(name)) from error
        if kind == "result":
            return result
        detail = result if kind == "mistake" else f"{name!r} failed:\n{result}"
        raise BenchError(f"{self.contender.label}: {detail}")

    def call(self, name: str, *args: Any, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """Run a method of the driver and return its result; raises as :meth:`receive`."""
        self.send(name, *args)
        return self.receive(deadline_s)

    def refresh_tree(self) -> None:
        """Look up which processes belong to the system now."""
        self._tree = process_tree(self._process.pid)

    def cpu_s(self) -> float:
        """Return the CPU time of all processes of the system so far, in seconds."""
        return cpu_seconds(self._tree)

    def memory(self) -> dict[str, Any]:
        """Return the PSS in MB: of each worker process, and of all processes of the system.

        Raises:
            BenchError: If this machine does not tell the memory of a process.
        """
        found = [pss_mb(pid) for pid in self.call("worker_pids")]
        workers = [value for value in found if value is not None]
        if not workers:
            raise BenchError(f"{self.contender.label}: /proc/PID/smaps_rollup cannot be read.")
        self.refresh_tree()
        every = [pss_mb(process.pid) for process in self._tree]
        return {
            "workers_mb": workers,
            "all_mb": sum(value for value in every if value is not None),
            "processes": len(self._tree),
        }

    def close(self) -> None:
        """End the system and all its processes, whatever state they are in."""
        if self._folder is None:
            return
        self.refresh_tree()
        with contextlib.suppress(OSError):
            self._to_child.close()  # the host leaves at the end of its input
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_DEADLINE_S)
        kill_all([*self._tree, *process_tree(self._process.pid)])
        self._process.wait()
        self._from_child.close()
        os.close(self._pidfd)
        self._folder.cleanup()
        self._folder = None  # type: ignore[assignment]

    def kill(self) -> None:
        """End all processes at once, without letting the system close itself."""
        if self._folder is not None:
            self.refresh_tree()
            kill_all(self._tree)
            self.close()

    def _died(self, name: str) -> str:
        code = self._process.poll()
        return (
            f"{self.contender.label}: its process died during {name!r} ({code=}).\n{self._tail()}"
        )

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
