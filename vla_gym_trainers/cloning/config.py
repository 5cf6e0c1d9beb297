"""Options of ``vla-gym-train mini``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tyro.conf import Suppress

from vla_gym.assets.pack import default_assets
from vla_gym.errors import ConfigError
from vla_gym.outside import (
    Count,
    Fraction,
    FractionBelow1,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from vla_gym_trainers.runs.settings import CheckpointSettings


@dataclass
class MiniConfig(CheckpointSettings):
    """Behaviour-clone the embedded VLA from recorded demonstrations.

    The run directory gets model/ (the network, float16) and, with eval_episodes, best/.
    """

    algorithm: ClassVar[str] = "mini"
    resumable: ClassVar[tuple[str, ...]] = (
        *CheckpointSettings.resumable,
        "steps",
        "checkpoint_every",
    )

    demos: str = "demos"
    """Folder that holds what ``vla-gym demos`` wrote, of one asset pack or of several."""
    demos_per_task: PositiveInt | None = None
    """Use only the first so many episodes of each file (one a task and look); None for all."""
    steps: PositiveInt = 6000
    """Optimiser steps; the learning rate follows a cosine over them."""
    batch_size: PositiveInt = 64
    """Frames per step; tasks are drawn uniformly."""
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate of AdamW, after 100 steps of warm-up."""
    weight_decay: NonNegativeFloat = 0.02
    """Weight decay of matrices; biases and norms have none."""
    ema: FractionBelow1 = 0.999
    """Decay of the weight average that is evaluated and saved."""
    token_loss_weight: NonNegativeFloat = 0.1
    """Weight of the token head's cross-entropy beside the L1 loss."""
    token_smoothing: NonNegativeFloat = 0.0
    """Standard deviation, in bins, of the Gaussian over which a target bin is spread: a bin's
    neighbours mean nearly the same, which the cross-entropy does not know. 0: none."""
    token_distillation: Fraction = 0.0
    """Share of a token's label that is the L1 head's own action instead of the demonstration's.
    The most frequent action, which greedy tokens take, can be to wait; the L1 head's median
    moves on, and with a share above one half greedy tokens follow it."""
    gripper_loss_weight: NonNegativeFloat = 0.5
    """Weight of the gripper in the L1 loss."""
    shift_pixels: Count = 3
    """Largest random shift of an image (of 64 pixels)."""
    proprio_noise: NonNegativeFloat = 0.03
    """Noise on proprioception in units of its standard deviation."""
    paraphrase_rate: Fraction = 0.5
    """Probability that a frame's instruction is said in other words."""
    word_dropout: Fraction = 0.02
    """Probability that a word is replaced by the unknown word."""
    held_out_episodes: Count = 2
    """Episodes a task that are only used for validation."""
    hidden_size: PositiveInt = 192
    """Width of the transformer."""
    num_layers: PositiveInt = 4
    """Blocks of the transformer."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 autocast; ``auto`` uses it where the CPU has the instructions, and on CUDA."""
    flow_layers: Count = 0
    """Transformer blocks of a flow head; 0: none."""
    flow_loss_weight: NonNegativeFloat = 1.0
    """Weight of the flow head's loss beside the L1 loss."""
    flow_draws: PositiveInt = 4
    """Noises and times that the flow head sees of each frame: the trunk, which is most of a step,
    runs once."""
    device: str = "cpu"
    """Torch device."""
    threads: PositiveInt = 1
    """Torch threads. One is fastest when other processes run on the same cores."""
    seed: Count = 0
    """Seed of weights, batches and augmentation."""
    film_every: Suppress[int] = 0  # no option: nothing is played while it learns
    assets: str = field(default_factory=default_assets)
    """Asset pack of the closed-loop episodes: lite, libero, or a path."""
    checkpoint_every: PositiveInt = 500
    """Optimiser steps between checkpoints and validations."""
    init_from: str | None = None
    """Start from this checkpoint (a name or a folder) instead of fresh weights."""
    eval_episodes: Count = 0
    """Closed-loop episodes a task on sampled layouts, at the end and every ``eval_every`` steps;
    the best weights by these are kept in best/. 0 for none."""
    eval_every: PositiveInt | None = None
    """Optimiser steps between closed-loop evaluations; None: one at the end."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If a value is out of range, or one is lacking.
        """
        check_fields(self)
        if self.eval_every is not None and not self.eval_episodes:
            raise ConfigError(
                f"eval_every={self.eval_every} needs eval_episodes, the episodes a task, got 0: "
                "give both or neither."
            )
