"""How much memory is free, and the error for what would not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vla_gym.errors import NotEnoughMemoryError

if TYPE_CHECKING:
    import torch


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


def free_memory(device: str | torch.device) -> int | None:
    """Return the bytes that are free on a torch device; None where that cannot be told."""
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return free_ram() if kind == "cpu" else None


def check_memory(needed: int, what: str, advice: str, device: str | torch.device = "cpu") -> None:
    """Check that a device has room for ``needed`` bytes of ``what``; ``advice`` ends the error.

    Raises:
        NotEnoughMemoryError: With the memory that is needed and the memory that is free.
    """
    free = free_memory(device)
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"{what} takes about {needed / 1e9:.1f} GB on {device}, which has {free / 1e9:.1f} GB "
            f"free: {advice}."
        )
