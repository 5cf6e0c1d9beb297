"""One layout of checkpoints for F1's phases: plain data in state.json, tensors beside it.

``state.json`` holds under ``trainer``: ``phase``; counters, random generators and sizes, as the
phase needs them; ``metrics``: the last validation's. ``f1.pt`` holds by name what of the world
model a phase trains (``model``, ...), its ``optimizer`` and more tensors; ``policy.safetensors``
and ``learner.pt`` are the explorer's, as PPO writes them. Schedules are functions of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.runs.run_dir import Checkpoint, RunDir

#: F1's phases, and the commands that train them.
TEACHER, STUDENT, ADVERSARIAL = "teacher", "student", "adversarial"
PHASES = {TEACHER: "world-model", STUDENT: "explorer", ADVERSARIAL: "adversarial"}
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
    check_phase(checkpoint, phase)
    try:
        tensors: dict[str, Any] = torch.load(
            checkpoint.folder / _FILE, map_location="cpu", weights_only=True
        )
    except Exception as error:  # pickle, zip and OS errors alike
        raise WeightsError(f"Cannot resume from {checkpoint.folder}: {error}") from error
    return tensors


def check_phase(checkpoint: Checkpoint, phase: str) -> None:
    """Check that a run may go on from a checkpoint.

    Raises:
        WeightsError: If it is another phase's.
    """
    found = checkpoint.state.get("phase")
    if found != phase:
        command = PHASES.get(str(found))
        mend = f"go on with 'vla-gym-train {command}'" if command else "give another one"
        raise WeightsError(
            f"{checkpoint.folder} is a checkpoint of phase {found!r}, expected {phase!r}: {mend}."
        )


def newest_of(run: Path, phases: Sequence[str], option: str) -> Checkpoint:
    """Return the newest checkpoint of a run of an earlier phase.

    Args:
        run: The run's directory.
        phases: It is of one of these.
        option: That named it, for the message.

    Raises:
        ConfigError: If it is no run, or one of another phase.
    """
    wanted = " or ".join(f"'vla-gym-train {PHASES[phase]}'" for phase in phases)
    found = RunDir(run).checkpoints()
    phase = Checkpoint.read(found[-1]).state.get("phase") if found else None
    if phase not in phases:
        command = PHASES.get(str(phase))
        what = f"one of '{command}'" if command else "none"
        raise ConfigError(f"{option} {run}: expected a run of {wanted}, this is {what}.")
    return Checkpoint.read(found[-1])
