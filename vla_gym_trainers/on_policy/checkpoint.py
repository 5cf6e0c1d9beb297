"""How far a run is, and all that it depends on, saved between two rollouts and brought back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.runs.run_dir import restoring
from vla_gym_trainers.runs.torch_helpers import (
    load_parameters,
    load_tensors,
    save_parameters,
    save_tensors,
)


def save_checkpoint(folder: Path, learner: Learner, reference: Policy | None) -> None:
    """Write a checkpoint's files while no rollout is under way.

    ``policy.safetensors`` and ``reference.safetensors`` hold what is trained, ``learner.pt`` the
    optimiser and the learner's generator. Environments need no state: the next rollout begins new
    episodes by its own seed.
    """
    save_parameters(folder / "policy.safetensors", learner.policy.state_dict())
    if reference is not None:
        save_parameters(folder / "reference.safetensors", reference.state_dict())
    save_tensors(folder / "learner.pt", learner.state_dict())


def load_checkpoint(folder: Path, learner: Learner, reference: Policy | None) -> None:
    """Bring learner, policy and reference to where a checkpoint was written.

    Raises:
        WeightsError: If a file is missing or damaged.
        ConfigError: If the parameters do not fit the policy.
    """
    with restoring(folder):
        numbers = load_tensors(folder / "learner.pt")
        learner.policy.load_state_dict(load_parameters(folder / "policy.safetensors"))
        if reference is not None:
            reference.load_state_dict(load_parameters(folder / "reference.safetensors"))
        learner.load_state_dict(numbers)


@dataclass
class Progress:
    """Counters of a run, over all processes.

    Attributes:
        steps: Control steps played.
        episodes: Episodes that ended.
        iteration: Rollouts learnt from.
        phase: Of the last rollout.
        staleness: Chunks by how many updates ago their policy acted.
        success: (control steps, success of the training episodes) by rollout.
    """

    steps: int = 0
    episodes: int = 0
    iteration: int = 0
    phase: str = ""
    staleness: dict[str, int] = field(default_factory=dict)
    success: list[tuple[int, float]] = field(default_factory=list)

    def count(self, metrics: Mapping[str, float], staleness: int) -> None:
        """Count a rollout's steps, episodes and chunks, played by a policy so many updates old."""
        self.steps += int(metrics["rollout/env_steps"])
        self.episodes += int(metrics["rollout/episodes"])
        chunks = self.staleness.get(str(staleness), 0) + int(metrics["rollout/chunks"])
        self.staleness[str(staleness)] = chunks
        if "rollout/success" in metrics:
            self.success.append((self.steps, metrics["rollout/success"]))

    def summary(self) -> dict[str, Any]:
        """Return what the result card says about the training."""
        return {
            "env_steps": self.steps,
            "rollouts": self.iteration,
            "staleness_chunks": dict(sorted(self.staleness.items())),
            "success": self.success,
        }
