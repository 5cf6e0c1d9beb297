"""What Linux tells about processes: the members of a session, CPU time, memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
