"""One child process a system: started, asked with a deadline, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.cli.bench.measuring import pss_mb, session_pids
from vla_gym.errors import BenchError
from vla_gym.suites.libero.upstream_env import write_config

if TYPE_CHECKING:
    from vla_gym.cli.bench.config import SystemSpec

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
#: This folder's name where there is no vla_gym.
_PEERS_PACKAGE = "vla_gym_bench"


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
        python, environment = sys.executable, os.environ | _ENVIRONMENT
        package = "vla_gym.cli.bench"
        arguments: tuple[Any, ...] = (spec,)
        self._folder = tempfile.TemporaryDirectory(prefix="vla-gym-bench-")
        folder = Path(self._folder.name)  # upstream writes into the working directory
        if spec.is_peer:
            python, arguments = spec.peer_command()
            environment |= {"LIBERO_CONFIG_PATH": str(folder), "PYTHONPATH": str(folder)}
            root = next(Path(python).parents[1].glob("lib/python*/site-packages/libero/libero"))
            write_config(folder, root, root / "assets")
            package = _PEERS_PACKAGE
            (folder / package).symlink_to(Path(__file__).resolve().parent)
        else:
            environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        begin = time.perf_counter()
        self._connection, other = Pipe()
        with other, open(folder / "output.txt", "wb") as log:
            self._process = subprocess.Popen(
                [python, "-P", "-m", f"{package}.host", str(other.fileno())],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        try:
            self._run("build", START_DEADLINE_S, *arguments)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - begin

    def call(self, name: str, *args: Any) -> Any:
        """Run a method of the system and return its result.

        Raises:
            BenchError: If the call failed, its process died or the deadline passed.
        """
        return self._run(name, CALL_DEADLINE_S, *args)

    def _run(self, name: str, deadline_s: float, *args: Any) -> Any:
        label, end = self.spec.name, time.monotonic() + deadline_s
        try:
            self._connection.send((name, args))
            while not self._connection.poll(0.2):
                if self._process.poll() is not None:  # its own children may hold the connection
                    raise EOFError
                if time.monotonic() > end:
                    late = f"{label}: no answer to {name!r} within {deadline_s:.0f} s."
                    raise BenchError(f"{late}\n{self._tail()}")
            went_well, result = self._connection.recv()
        except (EOFError, OSError) as error:
            died = f"{label}: its process died during {name!r}.\n{self._tail()}"
            raise BenchError(died) from error
        if not went_well:
            raise BenchError(f"{label}: {result}")
        return result

    def memory(self) -> dict[str, float]:
        """Return the memory (PSS) in MB of the largest worker and of all processes."""
        workers = max(pss_mb(pid) for pid in self.call("worker_pids"))
        return {"worker_mb": workers, "all_mb": sum(map(pss_mb, session_pids(self.pid)))}

    def close(self) -> None:
        """End the system and all its processes, whatever state they are in."""
        pids = set(session_pids(self.pid))
        with contextlib.suppress(BenchError):
            self._run("close", _CLOSE_DEADLINE_S)
        for pid in pids | set(session_pids(self.pid)):
            with contextlib.suppress(OSError):
                # A number that another process has got meanwhile is not of this session.
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_DEADLINE_S)
        self._connection.close()
        self._folder.cleanup()

    def _tail(self) -> str:
        log = Path(self._folder.name) / "output.txt"
        return log.read_text(errors="replace")[-_LOG_TAIL:].strip() if log.is_file() else ""
