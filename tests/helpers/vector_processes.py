"""What the tests of worker processes look at: processes, descriptors and shared blocks."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

#: For what should take a moment; far above what a loaded machine needs.
SOON = 60.0
MARKER = "VLA_GYM_TEST_MARKER"
SHM = "/dev/shm/"


def wait_until(condition: Callable[[], object], what: str, timeout: float = SOON) -> None:
    """Wait for a condition; fail when it does not come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.01)


def status(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process, or None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    found = status(pid)
    return found is not None and found[0] not in "ZX"


def parent_of(pid: int) -> int:
    found = status(pid)
    assert found is not None, f"no process {pid}"
    return found[1]


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_of(pid: int) -> set[int]:
    """Children, zombies included."""
    return {p for p in all_pids() if (found := status(p)) is not None and found[1] == pid}


def marked(marker: str) -> set[int]:
    """Processes that were started with this value of ``MARKER`` in their environment."""
    wanted, found = f"{MARKER}={marker}".encode(), set()
    for pid in all_pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:
            continue
    return found - {os.getpid()}


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


def named_blocks(pid: int) -> list[str]:
    """Entries of /dev/shm, semaphores included, that a process has mapped."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if SHM in line]


def orphan_blocks(before: set[str]) -> set[str]:
    """New entries of /dev/shm that no living process has mapped.

    Without the semaphores of multiprocessing: the vector environment has none, but a benchmark
    that another test process ends by force leaves those of Gymnasium's environments.
    """
    fresh = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.")}
    for pid in all_pids() if fresh else ():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        fresh = {name for name in fresh if f"/dev/shm/{name}" not in maps}
    return fresh
