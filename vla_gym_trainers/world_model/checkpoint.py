"""One layout of checkpoints for F1's phases: plain data in state.json, tensors in f1.pt.

``state.json`` holds under ``trainer``: ``phase``; counters, random generators and sizes, as the
phase needs them; ``metrics``: the last validation's. ``f1.pt`` holds by name what a phase trains
(``model``, ...), its ``optimizer`` and more tensors. The schedule is a function of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_gym.errors import WeightsError
from vla_gym_trainers.runs.run import Checkpoint

#: F1's phases, and the commands that train them.
TEACHER = "teacher"
PHASES = {TEACHER: "world-model", "student": "explorer", "adversarial": "adversarial"}
_FILE = "f1.pt"


def write_tensors(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Write state dicts and tensors by name into a checkpoint's folder."""
    # Into Python's file: of its own, torch loses why a write failed (a full disk).
    with open(folder / _FILE, "wb") as file:
        torch.save(dict(tensors), file)


def read_tensors(checkpoint: Checkpoint, phase: str) -> dict[str, Any]:
    """Read what :func:`write_tensors` wrote; nothing in the file is executed.

    Args:
        checkpoint: Of a run.
        phase: The phase that goes on.

    Raises:
        WeightsError: If it is another phase's, or damaged.
    """
    found = checkpoint.state.get("phase")
    if found != phase:
        command = PHASES.get(str(found))
        mend = f"go on with 'vla-gym-train {command}'" if command else "give another one"
        raise WeightsError(
            f"{checkpoint.folder} is a checkpoint of phase {found!r}, expected {phase!r}: {mend}."
        )
    try:
        tensors: dict[str, Any] = torch.load(
            checkpoint.folder / _FILE, map_location="cpu", weights_only=True
        )
    except Exception as error:  # pickle, zip and OS errors alike
        raise WeightsError(f"Cannot resume from {checkpoint.folder}: {error}") from error
    return tensors
