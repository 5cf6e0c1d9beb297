"""The state of a behaviour-cloning run, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vla_gym.errors import WeightsError
from vla_gym.vla.mini import MiniVLA
from vla_gym_trainers.runs.run_dir import replacing


@dataclass
class CloningRun:
    """Everything that a checkpoint restores.

    Attributes:
        model: The network in training.
        ema: Its running average, which is evaluated and saved.
        optimizer: AdamW over ``model``.
        rng: Source of batches and augmentation.
        step: Optimiser steps taken.
        seconds: Wall-clock time of these, without evaluations.
        best: Best mean success rate of the closed-loop evaluations; -1 before the first.
        best_step: The step it was reached at.
    """

    model: MiniVLA
    ema: MiniVLA
    optimizer: torch.optim.Optimizer
    rng: np.random.Generator
    step: int = 0
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = 0

    def save(self, path: Path) -> None:
        """Write the checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.bit_generator.state,
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "best_step": self.best_step,
        }
        with replacing(path) as file:
            torch.save(state, file)

    def restore(self, path: Path) -> None:
        """Read the checkpoint.

        Raises:
            WeightsError: If it is missing, corrupt or of another network.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(state["model"])
            self.ema.load_state_dict(state["ema"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.rng.bit_generator.state = state["rng"]
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            self.best, self.best_step = float(state["best"]), int(state["best_step"])
        except Exception as error:  # pickle, zip, key and shape errors alike
            raise WeightsError(f"Cannot resume from {path}: {error}") from error
