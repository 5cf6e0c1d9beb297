"""One measurement of a vector environment, and what Linux tells about its processes.

Peers import it too, so it is without vla_gym.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

#: Control steps: no episode reaches it, so every system plays the same steps.
NO_LIMIT = 10**9
#: LIBERO's evaluations run so many of these no-ops after set_init_state; our resets hold them.
NOOP, SETTLE_STEPS = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]), 10


class Measured(ABC):
    """Vector environments of one kind, built and reset once by the constructor.

    Attributes:
        envs: The vector environment.
        chunk_len: Control steps of a chunk, by which ``chunks_per_s`` counts.
    """

    envs: Any
    chunk_len: int

    @abstractmethod
    def reset(self, init_state_id: int, states: list[np.ndarray] | None) -> None:
        """Reset every environment to an official state and settle it.

        Args:
            init_state_id: Index of the state, the same for every environment.
            states: N of (1 + nq + nv), the states themselves, for LIBERO's.
        """

    @abstractmethod
    def play(self, actions: np.ndarray) -> int:
        """Play actions (N, T, 7), T a multiple of the chunk length; return the episodes ended."""

    def worker_pids(self) -> list[int]:
        """Return the processes that hold environments, or all but this one."""
        return [pid for pid in session_pids() if pid != os.getpid()]

    def measure(
        self,
        init_state_id: int,
        states: list[np.ndarray] | None,
        actions: np.ndarray,
        window_s: float,
    ) -> dict[str, float]:
        """Reset and play, again and again until ``window_s`` seconds of playing are measured.

        Returns:
            ``steps_per_s``: control steps a second of all environments; ``chunks_per_s``;
            ``cpu_ms``: CPU time of all processes of the system a control step; ``reset_s``: of the
            first reset; ``ended``: episodes that ended, which should be none.
        """
        seconds = cpu_s = reset_s = 0.0
        plays = ended = 0
        while seconds < window_s:
            begin = time.perf_counter()
            self.reset(init_state_id, states)
            reset_s = reset_s or time.perf_counter() - begin
            pids = session_pids()
            cpu_before, begin = cpu_seconds(pids), time.perf_counter()
            ended += self.play(actions)
            seconds += time.perf_counter() - begin
            cpu_s += cpu_seconds(pids) - cpu_before
            plays += 1
        steps = plays * actions.shape[0] * actions.shape[1]
        return {
            "steps_per_s": steps / seconds,
            "chunks_per_s": steps / seconds / self.chunk_len,
            "cpu_ms": 1e3 * cpu_s / steps,
            "reset_s": reset_s,
            "ended": float(ended),
        }

    def close(self) -> None:
        """Free everything."""
        self.envs.close()


def session_pids(leader: int | None = None) -> list[int]:
    """Return a session's leader (by default this process) and its other processes.

    Descendants that have left the session are counted too.
    """
    leader = os.getpid() if leader is None else leader
    parents: dict[int, tuple[int, int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if fields := _stat(int(name)):
            parents[int(name)] = int(fields[1]), int(fields[3])  # parent, session
    members: set[int] = {leader}
    while True:
        found = {p for p, (up, session) in parents.items() if up in members or session == leader}
        if found <= members:
            return sorted(members)
        members |= found


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time, user and system, that processes have used so far."""
    stats = [fields for pid in pids if (fields := _stat(pid))]
    return sum(int(f[11]) + int(f[12]) for f in stats) / os.sysconf("SC_CLK_TCK")


def pss_mb(pid: int) -> float:
    """Return a process's proportional set size in MB (10^6 bytes), 0 if it cannot be read.

    A page that n processes share counts as 1/n in each.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (the state) on; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name, in parentheses, may hold anything
