"""What the tests of worker processes look at: processes, descriptors and shared blocks."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

#: For what should take a moment; far above what a loaded machine needs.
SOON = 60.0
MARKER = "VLA_GYM_TEST_MARKER"


def wait_until(condition: Callable[[], object], what: str, timeout: float = SOON) -> None:
    """Wait for a condition; fail when it does not come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def children_of(pid: int) -> set[int]:
    """Children, zombies included."""
    try:
        return {child.pid for child in psutil.Process(pid).children()}
    except psutil.NoSuchProcess:
        return set()


def marked(marker: str) -> set[int]:
    """Processes that were started with this value of ``MARKER`` in their environment."""
    running = [(p.pid, p.info["environ"] or {}) for p in psutil.process_iter(["environ"])]
    return {pid for pid, names in running if names.get(MARKER) == marker} - {os.getpid()}


def new_marker() -> str:
    return uuid.uuid4().hex


def memfd_maps() -> int:
    """Mappings of memfd blocks in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:")


def descriptors() -> dict[str, str]:
    """Open descriptors of this process and where they point."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the one that lists the folder
    return found


def orphan_blocks(before: set[str]) -> set[str]:
    """New entries of /dev/shm that no living process has mapped.

    Without the semaphores of multiprocessing: the vector environment has none, but a benchmark
    that another test process ends by force leaves those of Gymnasium's environments.
    """
    fresh = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.")}
    for pid in psutil.pids() if fresh else ():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        fresh = {name for name in fresh if f"/dev/shm/{name}" not in maps}
    return fresh
