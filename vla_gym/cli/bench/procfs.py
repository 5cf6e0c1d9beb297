"""Process trees, their CPU time and their memory, read from Linux's /proc."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same number by its start time.

    Attributes:
        pid: Its number.
        started: Start time in clock ticks since boot.
    """

    pid: int
    started: int

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state not in "ZX"


@dataclass(frozen=True)
class _Stat:
    parent: int
    session: int
    cpu_ticks: int
    started: int
    state: str


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may hold anything; proc(5) counts the fields after it from 3.
    fields = text.rpartition(")")[2].split()
    cpu = int(fields[11]) + int(fields[12])
    return _Stat(int(fields[1]), int(fields[3]), cpu, int(fields[19]), fields[0])


def process_tree(root: int) -> list[Process]:
    """Return a process, its descendants, and whatever else runs in the session that it leads."""
    stats: dict[int, _Stat] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            stats[int(name)] = stat
    members = {root}
    grew = True
    while grew:
        found = {
            pid for pid, stat in stats.items() if stat.parent in members or stat.session == root
        }
        grew = not found <= members
        members |= found
    return [Process(pid, stats[pid].started) for pid in sorted(members) if pid in stats]


def cpu_seconds(processes: list[Process]) -> float:
    """Return the CPU time, user and system, that these processes have used so far."""
    stats = [(process, _stat(process.pid)) for process in processes]
    ticks = sum(s.cpu_ticks for p, s in stats if s is not None and s.started == p.started)
    return ticks / _TICKS_PER_S


def pss_mb(pid: int) -> float | None:
    """Return a process's proportional set size in MB (10^6 bytes), None if it cannot be read.

    A page that n processes share counts as 1/n in each.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    return None


def available_memory_mb() -> float:
    """Return the memory that can be had without swapping, in MB."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("inf")


def kill_all(processes: list[Process], timeout_s: float = 10.0) -> list[int]:
    """SIGKILL processes and wait for their end.

    Returns:
        Those that still run after ``timeout_s``; empty unless the kernel holds one.
    """
    for process in processes:
        if process.alive():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except OSError:
                continue
    deadline = time.monotonic() + timeout_s
    left = processes
    while left := [process for process in left if process.alive()]:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return [process.pid for process in left]
