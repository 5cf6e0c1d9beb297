"""From a teacher's behaviour to reinforcement learning, by control steps played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.settings import Weights


class Phase(NamedTuple):
    """What is done at one time.

    Attributes:
        name: ``"warmup"``, ``"transition"`` or ``"rl"``.
        epsilon: Probability that a chunk is the teacher's.
        weights: What is learnt.
    """

    name: str
    epsilon: float
    weights: Weights


@dataclass(frozen=True)
class Schedule:
    """Warm-up, transition, reinforcement learning.

    Until ``warmup_steps`` the teacher acts and the student clones it. During the following
    ``transition_steps`` epsilon falls linearly from 1 to 0, the weight of cloning with it, and the
    student's own chunks are reinforced. Then there is reinforcement learning alone.

    Attributes:
        warmup_steps: Control steps.
        transition_steps: Control steps.
        cloning_coef: Weight of the cross-entropy in warm-up and at the start of the transition.
        cloning_epochs: Passes over a rollout in the warm-up.
        cloning_minibatches: Gradient steps of such a pass.
        cloning_learning_rate: Of the VLA in the warm-up; None for the usual one.
    """

    warmup_steps: int = 0
    transition_steps: int = 0
    cloning_coef: float = 1.0
    cloning_epochs: int = 4
    cloning_minibatches: int = 8
    cloning_learning_rate: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a value is out of range.
        """
        if min(self.warmup_steps, self.transition_steps) < 0:
            raise ConfigError("warmup_steps and transition_steps must not be negative.")
        if min(self.cloning_epochs, self.cloning_minibatches) < 1:
            raise ConfigError("cloning_epochs and cloning_minibatches must be at least 1.")
        rate = self.cloning_learning_rate
        if not self.cloning_coef > 0.0 or (rate is not None and not rate > 0.0):
            raise ConfigError("cloning_coef and cloning_learning_rate must be positive.")

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher ever acts."""
        return self.warmup_steps + self.transition_steps > 0

    def at(self, steps: int) -> Phase:
        """Return what is done once so many control steps have been played."""
        if steps < self.warmup_steps:
            weights = Weights(
                rl=False,
                cloning=self.cloning_coef,
                epochs=self.cloning_epochs,
                num_minibatches=self.cloning_minibatches,
                learning_rate=self.cloning_learning_rate,
            )
            return Phase("warmup", 1.0, weights)
        past = steps - self.warmup_steps
        if past < self.transition_steps:
            epsilon = 1.0 - past / self.transition_steps
            return Phase("transition", epsilon, Weights(cloning=self.cloning_coef * epsilon))
        return Phase("rl", 0.0, Weights())
