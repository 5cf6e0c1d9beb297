"""Options of ``vla-gym-train world-model``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vla_gym.errors import ConfigError
from vla_gym.outside import (
    Count,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from vla_gym_trainers.runs.settings import CheckpointSettings
from vla_gym_trainers.runs.tasks import SuitesSettings
from vla_gym_trainers.world_model.data import COLLECTED


@dataclass
class WorldModelConfig(SuitesSettings, CheckpointSettings):
    """Train F1's world model (its phase 1, the teacher): a memory that predicts the wrist camera.

    Episodes are played and kept in data/; a tokenizer of wrist frames is trained, then the model.
    The run directory gets model/, which environments use, and videos/ of what it predicts.
    """

    algorithm: ClassVar[str] = "world-model"
    presets: ClassVar[tuple[str, ...]] = ("f1", "f1_tiny")
    resumable: ClassVar[tuple[str, ...]] = (*CheckpointSettings.resumable, "checkpoint_every")

    vla: str = "mini"
    """VLA whose features the memory takes in, and which plays the vla episodes."""
    chunk_len: PositiveInt = 4
    """Control steps of a step: the model predicts the frame after so many."""
    random_episodes: Count = 8
    """Training episodes a task of smooth random actions."""
    vla_episodes: Count = 4
    """Training episodes a task of the VLA with noise."""
    validation_episodes: PositiveInt = 1
    """Episodes a task of each of these behaviours on other layouts, for validation."""
    noise: Fraction = 0.15
    """Noise on the executed actions of the VLA and the expert, as in vla-gym demos."""
    num_envs: PositiveInt = 8
    """Environments at once while episodes are played."""
    num_workers: Count = 1
    """Processes that simulate, with hosts on each of them; 0: none but this one."""
    codebook_size: int = 512
    """Tokens that a place of a frame can have."""
    code_size: int = 16
    """Numbers of a code."""
    tokenizer_width: int = 32
    """Channels of the tokenizer's first layer."""
    tokenizer_steps: PositiveInt = 3000
    """Optimiser steps of the tokenizer."""
    tokenizer_batch_size: PositiveInt = 32
    """Frames of one of them."""
    tokenizer_learning_rate: PositiveFloat = 3e-3
    """Peak learning rate of the tokenizer, after 50 steps of warm-up; a cosine follows."""
    commitment: NonNegativeFloat = 0.25
    """Weight of the tokenizer's commitment loss (VQ-VAE, eq. 3)."""
    memory_enabled: bool = True
    """False: the memory is empty before every step, for comparison."""
    memory_hidden: int = 256
    """Width of the memory's GRU."""
    memory_num_layers: int = 1
    """Its layers."""
    width: int = 96
    """Width of the predictor's transformer."""
    num_blocks: int = 3
    """Its blocks."""
    steps: PositiveInt = 6000
    """Optimiser steps of the model."""
    batch_size: PositiveInt = 16
    """Windows of one of them."""
    bptt_length: PositiveInt = 8
    """Steps of a window, through which gradients flow; 1: none reach the memory's past."""
    sequential_training: bool = True
    """Windows follow each other through an episode and carry the memory along. False: they are
    drawn at random, and begin with the memory that the last window there left behind, which is
    stale."""
    learning_rate: PositiveFloat = 2e-3
    """Peak learning rate of AdamW, after 50 steps of warm-up; a cosine follows."""
    weight_decay: NonNegativeFloat = 0.05
    """Weight decay of the model."""
    checkpoint_every: PositiveInt = 500
    """Optimiser steps between checkpoints and validations; the tokenizer's come first."""
    film_every: Count = 1000
    """Training sequences between sample films in videos/; 0 for the last one only."""
    device: str = "cpu"
    """Torch device."""
    threads: PositiveInt = 1
    """Torch threads."""
    seed: Count = 0
    """Seed of episodes, weights and batches."""

    def __post_init__(self) -> None:
        """Check the values."""
        counts = tuple(f"{name}_episodes" for name in COLLECTED)
        check_fields(self)
        if not sum(getattr(self, name) for name in counts):
            raise ConfigError(f"No sequences: ask for at least one of {', '.join(counts)}.")

    def episodes(self, *, held_out: bool) -> dict[str, int]:
        """Return the episodes a task by behaviour, for training or for validation."""
        counts = {name: int(getattr(self, f"{name}_episodes")) for name in COLLECTED}
        if held_out:
            return {name: self.validation_episodes * (count > 0) for name, count in counts.items()}
        return counts

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the run: the tokenizer's and the model's."""
        return self.tokenizer_steps + self.steps
