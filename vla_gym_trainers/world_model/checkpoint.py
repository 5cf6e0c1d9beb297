"""One layout of checkpoints for F1's phases: plain data in state.json, tensors beside it.

``state.json`` holds under ``trainer``: ``phase``; counters, random generators and sizes, as the
phase needs them. ``f1.pt`` holds by name what of the world model a phase trains (``model``, ...),
its ``optimizer`` and more tensors; ``policy.safetensors`` and ``learner.pt`` are the explorer's, as
PPO writes them. Schedules are functions of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.runs.run_dir import Checkpoint, RunDir

#: F1's phases, and the commands that train them.
TEACHER, STUDENT, ADVERSARIAL = "teacher", "student", "adversarial"
PHASES = {TEACHER: "world-model", STUDENT: "explorer", ADVERSARIAL: "adversarial"}
F1_FILE = "f1.pt"


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


def check_run(run: Path, phases: Sequence[str], option: str) -> None:
    """Check that an option named a run of one of these phases.

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
