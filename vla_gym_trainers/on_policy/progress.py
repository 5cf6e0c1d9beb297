"""How far a run is: what its checkpoints and its result card tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
