"""Options of ``vla-gym-train mini``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vla_gym.errors import ConfigError


@dataclass
class MiniConfig:
    """Options of ``vla-gym-train mini``."""

    demos: str = "demos"
    """Folder that ``vla-gym demos`` wrote."""
    output: str = "runs/mini"
    """Run directory: TensorBoard, checkpoint.pt, model/ and best/ (float16), result.json."""
    demos_per_task: int | None = None
    """Use only the first so many episodes of each task; None for all."""
    minutes: float | None = 12.0
    """Length of the run in wall-clock minutes; the learning rate follows a cosine over it."""
    steps: int | None = None
    """Length of the run in optimiser steps instead; set minutes to None."""
    batch_size: int = 64
    """Frames per step; tasks are drawn uniformly."""
    learning_rate: float = 6e-4
    """Peak learning rate of AdamW, after 100 steps of warm-up."""
    weight_decay: float = 0.02
    """Weight decay of matrices; biases and norms have none."""
    ema: float = 0.999
    """Decay of the weight average that is evaluated and saved."""
    token_loss_weight: float = 0.1
    """Weight of the token head's cross-entropy beside the L1 loss."""
    token_smoothing: float = 0.0
    """Standard deviation, in bins, of the Gaussian over which a target bin is spread: a bin's
    neighbours mean nearly the same, which the cross-entropy does not know. 0: none."""
    token_distillation: float = 0.0
    """Share of a token's label that is the L1 head's own action instead of the demonstration's.
    The most frequent action, which greedy tokens take, can be to wait; the L1 head's median
    moves on, and with a share above one half greedy tokens follow it."""
    gripper_loss_weight: float = 0.5
    """Weight of the gripper in the L1 loss."""
    shift_pixels: int = 3
    """Largest random shift of an image (of 64 pixels)."""
    proprio_noise: float = 0.03
    """Noise on proprioception in units of its standard deviation."""
    paraphrase_rate: float = 0.5
    """Probability that a frame's instruction is said in other words."""
    word_dropout: float = 0.02
    """Probability that a word is replaced by the unknown word."""
    held_out_episodes: int = 2
    """Episodes a task that are only used for validation."""
    hidden_size: int = 192
    """Width of the transformer."""
    num_layers: int = 4
    """Blocks of the transformer."""
    token_head_width: int = 0
    """Hidden units of the token head; 0: one linear layer."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 autocast; ``auto`` uses it where the CPU has the instructions, and on CUDA."""
    device: str = "cpu"
    """Torch device."""
    threads: int = 1
    """Torch threads. One is fastest when other processes run on the same cores."""
    seed: int = 0
    """Seed of weights, batches and augmentation."""
    save_minutes: float = 2.0
    """Minutes between checkpoints and validations."""
    init_from: str | None = None
    """Start from this checkpoint (a name or a folder) instead of fresh weights."""
    resume: bool = False
    """Continue the run in ``output`` where its checkpoint left it."""
    eval_episodes: int = 0
    """Closed-loop episodes a task on sampled layouts, at the end and every ``eval_every`` steps;
    the best weights by these are kept in best/. 0 for none."""
    eval_every: int | None = None
    """Optimiser steps between closed-loop evaluations; None: one at the end."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If the length is not given exactly once or a value is out of range.
        """
        if (self.minutes is None) == (self.steps is None):
            raise ConfigError(
                f"Give either minutes or steps, got minutes={self.minutes}, steps={self.steps}: "
                "set the other to None."
            )
        if (self.minutes or self.steps or 0) <= 0 or self.batch_size < 1 or self.threads < 1:
            raise ConfigError("minutes or steps, batch_size and threads must be positive.")
        if min(self.token_loss_weight, self.token_smoothing) < 0.0:
            raise ConfigError(
                "Expected token_loss_weight and token_smoothing >= 0, got "
                f"{self.token_loss_weight} and {self.token_smoothing}."
            )
        if not 0.0 <= self.token_distillation <= 1.0:
            raise ConfigError(
                f"Expected token_distillation in [0, 1], got {self.token_distillation}."
            )
        if not 0.0 <= self.ema < 1.0:
            raise ConfigError(f"Expected 0 <= ema < 1, got {self.ema}.")
