"""What behaviour cloning changes from step to step, and its part of a checkpoint."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_gym.vla.mini.model import MiniVLA, MiniVLAConfig
from vla_gym_trainers.cloning.config import MiniConfig
from vla_gym_trainers.runs.run_dir import Checkpoint, restoring
from vla_gym_trainers.runs.torch_helpers import load_tensors, save_tensors

_EVALUATION = ("closed_loop", "evaluated", "best", "best_step")


@dataclass
class CloningState:
    """Everything that a checkpoint restores.

    Attributes:
        model: The network in training.
        ema: Its running average, which is evaluated and saved.
        optimizer: AdamW over ``model``.
        rng: Source of batches and augmentation.
        step: Optimiser steps taken.
        closed_loop: Of the last closed-loop evaluation, successes by task.
        evaluated: The step of that evaluation; -1 before the first.
        best: Best mean success rate of these evaluations; -1 before the first.
        best_step: The step it was reached at.
        best_weights: The average's weights at that step; none before the first.
    """

    model: MiniVLA
    ema: MiniVLA
    optimizer: torch.optim.Optimizer
    rng: np.random.Generator
    step: int = 0
    closed_loop: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluated: int = -1
    best: float = -1.0
    best_step: int = 0
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: MiniVLA, config: MiniConfig) -> CloningState:
        """Begin with a network."""
        model.train().to(config.device)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True
        )
        ema = copy.deepcopy(model).eval().requires_grad_(False)
        return cls(model, ema, optimizer, np.random.default_rng(config.seed))

    @classmethod
    def load(cls, checkpoint: Checkpoint, config: MiniConfig) -> CloningState:
        """Read a checkpoint; vocabulary and normalisation are its own.

        Raises:
            WeightsError: If it is corrupt.
        """
        plain = checkpoint.state
        with restoring(checkpoint.folder):
            model = MiniVLA(MiniVLAConfig.of(plain["model"], checkpoint.folder))
            state = cls.of(model, config)
            tensors = load_tensors(checkpoint.folder / "cloning.pt")
            for name in ("model", "ema", "optimizer"):
                getattr(state, name).load_state_dict(tensors[name])
            state.best_weights = tensors["best"]
            state.rng.bit_generator.state = plain["rng"]
            for name in _EVALUATION:
                setattr(state, name, plain[name])
        state.step = checkpoint.step
        return state

    def plain(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is plain data."""
        return {
            "model": asdict(self.model.config),
            "rng": self.rng.bit_generator.state,
            **{name: getattr(self, name) for name in _EVALUATION},
        }

    def save(self, folder: Path) -> None:
        """Write the tensors into a checkpoint's folder."""
        tensors = {n: getattr(self, n).state_dict() for n in ("model", "ema", "optimizer")}
        save_tensors(folder / "cloning.pt", tensors | {"best": self.best_weights})
