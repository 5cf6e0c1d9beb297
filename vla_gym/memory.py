"""How much memory is free, and the error for what would not fit."""

from __future__ import annotations

import re
from pathlib import Path

from vla_gym.errors import NotEnoughMemoryError


def free_ram() -> int | None:
    """Return the bytes that this process may still take; None where that cannot be told."""
    candidates = []
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        candidates += [int(found[1]) * 1024] if found else []
        # A container's own limit; pages of files that were read count as used, but can be freed.
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        pages = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
        candidates.append(limit - used + (int(pages[1]) if pages else 0))
    except (OSError, ValueError):  # no Linux, no limit
        pass
    return min(candidates, default=None)


def check_ram(needed: int, what: str, advice: str) -> None:
    """Check that there is room, before it is taken.

    Args:
        needed: In bytes.
        what: Is to be allocated.
        advice: What to do otherwise.

    Raises:
        NotEnoughMemoryError: With the memory that is needed and the memory that is free.
    """
    free = free_ram()
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"{what} takes about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: {advice}."
        )
