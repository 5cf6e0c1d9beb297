"""What a run's log holds, without what differs from run to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_gym_trainers.report.data import read_rows

#: Keys that say how long something took; everything else repeats bit for bit after resuming.
TIMES = {"wall_s"} | {
    f"time/{name}" for name in ("fps", "time_elapsed", "rollout", "forward", "learn", "wait")
}


def rows_without_times(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_rows(path)]
