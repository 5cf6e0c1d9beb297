"""How far a run is, and all that it depends on, saved between two rollouts and brought back."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from vla_gym.errors import WeightsError
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.runs.result_card import write_json

#: Raised when the content changes, so that an old checkpoint is refused, not misread.
FORMAT = 1


def parameter_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return a policy's ``state_dict()`` as the content of a safetensors file."""
    return save({k: v.contiguous() for k, v in state.items()})


def load_parameters(path: Path) -> dict[str, Tensor]:
    """Read a file of :func:`parameter_bytes`.

    Raises:
        WeightsError: If the file is missing or damaged.
    """
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} is no whole file of parameters: {error}") from error


def save_checkpoint(
    folder: Path,
    learner: Learner,
    reference: Policy | None,
    run_state: Mapping[str, Any],
) -> None:
    """Write a checkpoint while no rollout is under way.

    ``policy.safetensors`` and ``reference.safetensors`` hold what is trained, ``learner.pt`` the
    optimiser and the learner's generator, ``state.json`` what the run itself keeps. Environments
    need no state: the next rollout begins new episodes by its own seed.

    Args:
        folder: Where; see ``RunDir.new_checkpoint``.
        learner: The learner.
        reference: Of the KL penalty, or None.
        run_state: Plain JSON types; :func:`load_checkpoint` returns it.
    """
    (folder / "policy.safetensors").write_bytes(parameter_bytes(learner.policy.state_dict()))
    if reference is not None:
        (folder / "reference.safetensors").write_bytes(parameter_bytes(reference.state_dict()))
    # Into Python's file: of its own, torch loses why a write failed (a full disk).
    with open(folder / "learner.pt", "wb") as file:
        torch.save(learner.state_dict(), file)
    write_json(folder / "state.json", {"format": FORMAT, "run": dict(run_state)})


def load_checkpoint(folder: Path, learner: Learner, reference: Policy | None) -> dict[str, Any]:
    """Bring learner, policy and reference to where a checkpoint was written.

    Returns:
        ``run_state``.

    Raises:
        WeightsError: If a file is missing, damaged or of another format.
        ConfigError: If the parameters do not fit the policy.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise WeightsError(f"{folder} has format {state['format']}, expected {FORMAT}.")
        numbers = torch.load(folder / "learner.pt", map_location="cpu", weights_only=True)
    except (OSError, EOFError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{folder} is no whole checkpoint: {error}") from error
    learner.policy.load_state_dict(load_parameters(folder / "policy.safetensors"))
    if reference is not None:
        reference.load_state_dict(load_parameters(folder / "reference.safetensors"))
    learner.load_state_dict(numbers)
    run_state: dict[str, Any] = state["run"]
    return run_state


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
        staleness: Chunks by how many updates ago their policy acted .
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

    def count(self, metrics: Mapping[str, float], staleness: int) -> None:
        """Count a rollout's steps and chunks, which a policy of so many updates ago played."""
        self.steps += int(metrics["rollout/env_steps"])
        self.staleness[staleness] += int(metrics["rollout/chunks"])

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
