"""How far a run is: counters, rates, the progress bar."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_gym_trainers.on_policy.rollout import Rollout


@dataclass
class Progress:
    """Counters of a run, over all processes.

    Attributes:
        total: Control steps to play.
        show: Whether to show a bar.
        steps: Control steps played.
        iteration: Rollouts learnt from.
        next_checkpoint: Control steps at which the next checkpoint is due.
        phase: Of the last rollout.
        staleness: Chunks by how many updates ago their policy acted (of this process).
        success: (control steps, success of the training episodes) by rollout.
    """

    total: int
    show: bool
    next_checkpoint: int
    steps: int = 0
    iteration: int = 0
    phase: str = ""
    staleness: Counter[int] = field(default_factory=Counter)
    success: list[tuple[int, float]] = field(default_factory=list)
    seconds_before: float = 0.0
    _started: float = field(default_factory=time.perf_counter)
    _bar: Any = None

    @property
    def seconds(self) -> float:
        """Seconds of this run so far, those before it was resumed included."""
        return self.seconds_before + time.perf_counter() - self._started

    def count_staleness(self, rollout: Rollout) -> None:
        """Count how old the policies were that played a rollout."""
        valid = rollout.data["valid"]
        ages = (self.iteration - rollout.data["version"])[valid]
        for age, count in zip(*(x.tolist() for x in ages.unique(return_counts=True)), strict=True):
            self.staleness[int(age)] += int(count)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show the bar with the success of the last rollout."""
        success = metrics.get("rollout/success")
        if success is not None:
            self.success.append((self.steps, success))
        if not self.show:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, unit="step")
        self._bar.set_description(self.phase, refresh=False)
        if success is not None:
            self._bar.set_postfix(success=f"{success:.2f}", refresh=False)
        self._bar.update(self.steps - self._bar.n)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers."""
        return {
            "steps": self.steps,
            "iteration": self.iteration,
            "next_checkpoint": self.next_checkpoint,
            "phase": self.phase,
            "staleness": {str(k): v for k, v in self.staleness.items()},
            "success": [list(pair) for pair in self.success],
            "seconds": self.seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.steps, self.iteration = int(state["steps"]), int(state["iteration"])
        self.next_checkpoint, self.phase = int(state["next_checkpoint"]), state["phase"]
        self.staleness = Counter({int(k): int(v) for k, v in state["staleness"].items()})
        self.success = [(int(steps), float(rate)) for steps, rate in state["success"]]
        self.seconds_before, self._started = float(state["seconds"]), time.perf_counter()

    def summary(self) -> dict[str, Any]:
        """Return what the result card says about the training."""
        return {
            "env_steps": self.steps,
            "rollouts": self.iteration,
            "minutes": round(self.seconds / 60, 3),
            "env_steps_per_second": round(self.steps / max(self.seconds, 1e-9), 2),
            "staleness_chunks": {str(k): v for k, v in sorted(self.staleness.items())},
            "success": [list(pair) for pair in self.success],
        }
