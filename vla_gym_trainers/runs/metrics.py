"""Where a run's metrics go: a JSONL file that can be cut back, and TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat

#: Keys that say how long something took; everything else repeats bit for bit after resuming.
TIME_KEYS = (
    "wall_s",
    "time/fps",
    "time/time_elapsed",
    "time/rollout",
    "time/forward",
    "time/learn",
    "time/wait",
)


class JsonlWriter(KVWriter):
    """One JSON object a log: ``step`` (chunks), ``wall_s`` (Unix time) and SB3's keys.

    A number that is not finite is written as null.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        """Open the file.

        Args:
            path: The file.
            keep_bytes: Cut it back to this length and go on there; None begins anew.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep_bytes is not None and path.exists():
            os.truncate(path, min(keep_bytes, path.stat().st_size))
        self._file = open(path, "wb" if keep_bytes is None else "ab")  # noqa: SIM115

    def write(
        self,
        key_values: dict[str, Any],
        key_excluded: dict[str, tuple[str, ...]],
        step: int = 0,
    ) -> None:
        """Append one line and flush it; see SB3."""
        row: dict[str, Any] = {"step": step, "wall_s": round(time.time(), 3)}
        for key, value in sorted(key_values.items()):
            if "json" in (key_excluded.get(key) or ()):
                continue
            number = _number(value)
            if number is not NotImplemented:
                row[key] = number
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def position(self) -> int:
        """Bring everything to the disk and return the file's length."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter(TensorBoardOutputFormat):
    """SB3's TensorBoard writer, which after resuming hides what the cut-off run logged later."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Open a new event file.

        Args:
            folder: Folder of the event files.
            purge_step: Points of older files at this step and later disappear.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)
        self._is_closed = False


class RunLogger(Logger):
    """SB3's logger with the two writers, and with a state."""

    def __init__(
        self, metrics: Path, tensorboard: Path, state: Mapping[str, Any] | None = None
    ) -> None:
        """Open both.

        Args:
            metrics: The JSONL file.
            tensorboard: Folder of the event files.
            state: What :meth:`state` returned where the run goes on.
        """
        self.jsonl = JsonlWriter(metrics, None if state is None else int(state["bytes"]))
        purge = None if state is None else int(state["step"]) + 1
        super().__init__(str(tensorboard), [self.jsonl, TensorBoardWriter(tensorboard, purge)])
        if state is not None:
            self.name_to_value.update(state["values"])
            self.name_to_count.update(state["counts"])
            self.name_to_excluded.update(state["excluded"])

    def state(self, step: int) -> dict[str, Any]:
        """Return what has been recorded and not been written yet, and how much has.

        Args:
            step: Chunks so far.
        """
        return {
            "step": step,
            "bytes": self.jsonl.position(),
            "values": dict(self.name_to_value),
            "counts": dict(self.name_to_count),
            "excluded": dict(self.name_to_excluded),
        }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a line that a killed process left half is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def column(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of the rows that have a number for ``key``."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _number(value: Any) -> Any:
    """Return a JSON number, string or null; NotImplemented for figures and the like."""
    if isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item") and np.size(value) == 1:
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if isinstance(value, int) else NotImplemented
