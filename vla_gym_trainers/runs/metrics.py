"""Where a run's metrics go: a JSONL file that can be cut back, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError


class RunLogger:
    """Collects metrics by name and writes them; the methods that SB3's algorithms call on a logger.

    Its state goes into checkpoints: what a killed run had logged after one is cut off and logged
    again, so every metric appears once.
    """

    def __init__(
        self,
        metrics: Path,
        tensorboard: Path,
        state: Mapping[str, Any] | None = None,
        wandb_project: str | None = None,
    ) -> None:
        """Open the writers, anew or from what :meth:`state` returned where the run goes on.

        Raises:
            ConfigError: If Weights & Biases is asked for and not installed.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._wandb = None if wandb_project is None else start_wandb(wandb_project, metrics.parent)
        metrics.parent.mkdir(parents=True, exist_ok=True)
        state = state or {"bytes": 0, "step": -1, "values": {}, "counts": {}, "hidden": ()}
        if state["bytes"] and metrics.exists():
            os.truncate(metrics, min(int(state["bytes"]), metrics.stat().st_size))
        self._file = open(metrics, "ab" if state["bytes"] else "wb")  # noqa: SIM115
        # TensorBoard hides the points of older event files from this step on.
        purge = int(state["step"]) + 1
        self.tensorboard = SummaryWriter(log_dir=str(tensorboard), purge_step=purge)
        self._values: dict[str, Any] = dict(state["values"])
        self._counts: dict[str, int] = dict(state["counts"])
        self._hidden: set[str] = set(state["hidden"])

    def record(self, key: str, value: Any, exclude: str | Sequence[str] | None = None) -> None:
        """Set a metric of the next log; NumPy scalars and arrays of one element are numbers.

        To exclude ``"tensorboard"`` keeps it out of TensorBoard.
        """
        self._values[key] = value
        if exclude and "tensorboard" in exclude:
            self._hidden.add(key)

    def record_mean(self, key: str, value: float) -> None:
        """Set a metric of the next log to the mean of the values recorded since the last one."""
        count = self._counts.get(key, 0)
        mean = self._values[key] if count else 0.0
        mean = np.nan if mean is None else mean  # which a checkpoint holds in its place
        self._values[key] = mean * count / (count + 1) + float(value) / (count + 1)
        self._counts[key] = count + 1

    def dump(self, step: int = 0) -> None:
        """Write what has been recorded, and forget it; numbers that are not finite become null.

        Steps are chunks or control steps so far, whatever the run counts.
        """
        values = self._plain_values()
        row = {"step": step, "wall_s": round(time.time(), 3), **values}
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
        shown = {key: value for key, value in numbers.items() if key not in self._hidden}
        for key, value in shown.items():
            self.tensorboard.add_scalar(key, value, step)
        self.tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(shown, step=step)
        self._values, self._counts, self._hidden = {}, {}, set()

    def state(self, step: int) -> dict[str, Any]:
        """Return what has been recorded and not been written yet, and how much has (plain data)."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {
            "step": step,
            "bytes": self._file.tell(),
            "values": self._plain_values(),
            "counts": dict(self._counts),
            "hidden": sorted(self._hidden),
        }

    def _plain_values(self) -> dict[str, Any]:
        """Return what has been recorded, sorted, without what no line of JSON holds."""
        values = {key: _plain(self._values[key]) for key in sorted(self._values)}
        kinds = bool | int | float | str | None
        return {key: value for key, value in values.items() if isinstance(value, kinds)}

    def close(self) -> None:
        """Close the writers."""
        self._file.close()
        self.tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def start_wandb(project: str, run_dir: Path) -> Any:
    """Begin or go on with the run of Weights & Biases that belongs to a run directory.

    Its ``wandb_id`` says which run that is.

    Raises:
        ConfigError: If the package is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"--wandb needs Weights & Biases ({error}): pip install wandb, or leave --wandb out; "
            "TensorBoard is written in any case."
        ) from error
    run_dir.mkdir(parents=True, exist_ok=True)
    name = run_dir / "wandb_id"
    if not name.is_file():
        name.write_text(uuid.uuid4().hex, encoding="utf-8")
    return wandb.init(
        project=project,
        name=run_dir.name,
        id=name.read_text(encoding="utf-8"),
        resume="allow",
        dir=str(run_dir),
    )


def _plain(value: Any) -> Any:
    """Return a number as Python's, None if it is not finite; anything else unchanged."""
    if hasattr(value, "item") and np.size(value) == 1:
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
