"""Rewards that a world model gives, pure functions of states and predictions; their settings.

F1's explorer is paid 0.5 ``memory_divergence`` + 0.5 ``uncertainty``, its adversarial phase by
``prediction_error``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model.losses import next_token_loss

#: Names of the terms: ``task`` is the environment's own reward, ``coverage`` 1 where the arm is in
#: one of the :func:`cells` that is new in its episode, else 0; the others are functions below.
TERMS = "task", "memory_divergence", "uncertainty", "prediction_error", "coverage"
TASK, DIVERGENCE, UNCERTAINTY, ERROR, COVERAGE = TERMS

#: Side of a cell of positions, in metres; smaller ones are new nearly every chunk of 4 steps.
CELL = 0.05


def memory_divergence(before: Tensor, after: Tensor) -> Tensor:
    """Return ``|s_{t+1} - s_t| / sqrt(S)``, (B,): the root mean square of a state's (B, S) change.

    The numbers of a GRU's state are within (-1, 1), so this is within [0, 2).
    """
    return (after - before).norm(dim=1) / math.sqrt(before.shape[1])


def uncertainty(logits: Tensor) -> Tensor:
    """Return ``mean over places of H(p) / log K``, (B,) in [0, 1], with ``H = -sum p log p``.

    Of logits (B, P, K) of the next frame's tokens. 0: the model is sure of every token; 1: it
    holds all K for equally likely.
    """
    log_p = logits.log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return entropy.mean(dim=1) / math.log(logits.shape[-1])


def prediction_error(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return ``mean over places of -log p(next token) / log K``, (B,), at least 0.

    Of logits (B, P, K) and the tokens (B, P) that came. 1 is what a guess comes to that holds all K
    for equally likely; a model that was sure of something else is above.
    """
    return next_token_loss(logits, next_tokens).mean(dim=1) / math.log(logits.shape[-1])


def cells(positions: np.ndarray) -> np.ndarray:
    """Return the cells (n, D) int64 of a grid that positions (n, D), in metres, are in."""
    return np.floor(positions / CELL).astype(np.int64)


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of reward terms.

    Raises:
        ConfigError: If a term is unknown, none is given, or a weight is not finite.
    """
    unknown = [name for name in weights if name not in TERMS]
    if unknown or not weights or not isinstance(weights, Mapping):
        raise ConfigError(
            f"Expected weights by name of the reward terms {', '.join(TERMS)}, got "
            f"{', '.join(map(repr, unknown)) or weights or 'none'}."
        )
    numbers = int | float | np.number
    bad = {k: x for k, x in weights.items() if not isinstance(x, numbers) or not math.isfinite(x)}
    if bad:
        raise ConfigError(f"Expected finite weights of reward terms, got {bad}.")
    return {name: float(value) for name, value in weights.items()}


@dataclass
class WorldModelSettings:
    """A world model beside the policy, and the rewards that it gives."""

    world_model: str | None = None
    """World model whose memory a policy on the RL token sees as well: a run of vla-gym-train
    world-model, or its model/ folder."""
    rewards: tuple[str, ...] = ()
    """Weights of the terms that training is paid by, such as task=1 uncertainty=0.1; terms: task,
    memory_divergence, uncertainty, prediction_error, coverage. Default: the task's reward alone."""

    def reward_weights(self) -> dict[str, float] | None:
        """Return the weights by term; None where the reward is the task's.

        Raises:
            ConfigError: If a term is unknown or given twice, or a weight is no number.
        """
        if not self.rewards:
            return None
        weights: dict[str, float] = {}
        for text in self.rewards:
            name, _, value = text.partition("=")
            try:
                number = float(value)
            except ValueError:
                raise ConfigError(
                    f"Expected rewards like task=1 uncertainty=0.1, got {text!r:.80}."
                ) from None
            if name in weights:
                raise ConfigError(f"rewards name the term {name!r} twice: give it one weight.")
            weights[name] = number
        return check_weights(weights)

    @property
    def pays_for_more(self) -> bool:
        """Whether training is paid for anything but the task, or for it otherwise than once."""
        weights = self.reward_weights() or {TASK: 1.0}
        return {name: weight for name, weight in weights.items() if weight} != {TASK: 1.0}

    def check_world_model(self) -> None:
        """Check the settings without loading anything.

        Raises:
            ConfigError: If rewards are wrong, or there is no world model that gives them.
        """
        if self.reward_weights() is not None and self.world_model is None:
            raise ConfigError(
                f"rewards ({' '.join(self.rewards)}) are given by a world model: add --world-model "
                "RUN, of vla-gym-train world-model."
            )
