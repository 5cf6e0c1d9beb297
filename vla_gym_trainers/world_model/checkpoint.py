"""One layout of checkpoints for F1's phases: plain data in state.json, tensors beside it.

``state.json`` holds under ``trainer``: ``phase``; counters, random generators and sizes, as the
phase needs them. ``f1.pt`` holds by name what of the world model a phase trains (``model``, ...),
its ``optimizer`` and more tensors; ``policy.safetensors`` and ``learner.pt`` are the explorer's, as
PPO writes them. Schedules are functions of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.runs.run_dir import Checkpoint, RunDir
from vla_gym_trainers.runs.torch_helpers import load_tensors

#: F1's phases, and the commands that train them.
TEACHER, STUDENT, ADVERSARIAL = "teacher", "student", "adversarial"
PHASES = {TEACHER: "world-model", STUDENT: "explorer", ADVERSARIAL: "adversarial"}
F1_FILE = "f1.pt"


def read_tensors(checkpoint: Checkpoint, phase: str) -> dict[str, Any]:
    """Read the ``f1.pt`` that a phase goes on from; nothing in the file is executed.

    Raises:
        WeightsError: If it is another phase's, or damaged.
    """
    check_phase(checkpoint, phase)
    return load_tensors(checkpoint.folder / F1_FILE)


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
    """Return the newest checkpoint of a run of one of these phases, which an option named.

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
