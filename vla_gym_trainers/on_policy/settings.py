"""Numbers of the optimisation, and what of a rollout is learnt."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.losses import RatioLevel


@dataclass(frozen=True)
class LearnerSettings:
    """Numbers of the optimisation; the trainers' configurations say what each is for."""

    learning_rate: float = 1e-4
    value_learning_rate: float = 1e-3
    epochs: int = 1
    num_minibatches: int = 4
    micro_batch_size: int = 32
    clip_low: float = 0.2
    clip_high: float = 0.28
    log_ratio_clamp: float = 10.0
    ratio_level: RatioLevel = "token"
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    value_coef: float = 0.5
    value_clip: float | None = 0.2
    value_epochs: int = 0
    value_replay: int = 8
    max_grad_norm: float = 1.0
    skip_factor: float | None = 10.0
    target_kl: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a value is out of range.
        """
        for name in ("epochs", "num_minibatches", "micro_batch_size", "value_replay"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.value_epochs < 0:
            raise ConfigError(f"value_epochs must not be negative, got {self.value_epochs}.")
        for name in ("learning_rate", "clip_low", "clip_high", "log_ratio_clamp", "max_grad_norm"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}.")
        for name in ("entropy_coef", "kl_coef", "value_coef", "value_learning_rate"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")
        for name in ("value_clip", "target_kl"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"{name} must be positive or None, got {value}.")
        if self.clip_low >= 1.0:
            raise ConfigError(f"clip_low must be below 1, got {self.clip_low}.")
        if self.skip_factor is not None and self.skip_factor <= 1.0:
            raise ConfigError(f"skip_factor must exceed 1, got {self.skip_factor}.")


@dataclass(frozen=True)
class Weights:
    """What is learnt from a rollout, and how much of it.

    Attributes:
        rl: Whether the surrogate, entropy and KL losses take part.
        value: Whether the value loss does, if there is a value head.
        cloning: Weight of the cross-entropy to the teacher's tokens.
        epochs: In place of the learner's.
        num_minibatches: In place of the learner's.
        learning_rate: Of the VLA, in place of the learner's.
    """

    rl: bool = True
    value: bool = True
    cloning: float = 0.0
    epochs: int | None = None
    num_minibatches: int | None = None
    learning_rate: float | None = None
