"""Losses of the world model: states along a window, cross-entropy of the next tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_gym_trainers.world_model.protocol import WorldModel


class Window(NamedTuple):
    """B windows of T consecutive steps, each inside one episode.

    Attributes:
        features: (B, T, F).
        proprio: (B, T, proprio size).
        tokens: (B, T, P) of the frames seen at the steps.
        last_actions: (B, T, C * A) what led to them.
        actions: (B, T, C * A) what is executed at them.
        next_tokens: (B, T, P) of the frames that follow.
        valid: (B, T) bool: there is such a step, and the one that follows is known.
    """

    features: Tensor
    proprio: Tensor
    tokens: Tensor
    last_actions: Tensor
    actions: Tensor
    next_tokens: Tensor
    valid: Tensor


def states_along(model: WorldModel, window: Window, state: Tensor) -> Tensor:
    """Return the states (B, T, S) after each step of a window, with gradients inside it.

    Backpropagation through time is truncated at the window's beginning: ``state`` (B, S), that of
    the step before, is detached.
    """
    state, states = state.detach(), []
    for t in range(window.tokens.shape[1]):
        seen = window.features[:, t], window.proprio[:, t], window.last_actions[:, t]
        state = model.update(state, *seen)
        states.append(state)
    return torch.stack(states, dim=1)


def next_token_loss(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return ``-log p(next token)`` (N, P) in nats, of logits (N, P, K) and tokens (N, P)."""
    loss = F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), reduction="none")
    return loss.view(next_tokens.shape)


def window_loss(model: WorldModel, window: Window, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean cross-entropy of a window, its accuracy and its states (B, T, S).

    ``L = mean over valid steps t and places p of -log softmax(logits(s_t, tokens_t, a_t))_p at
    tokens_{t+1, p}``, from the state (B, S) before the window. The accuracy is the share of tokens
    whose likeliest value is right.
    """
    states, valid = states_along(model, window, state), window.valid
    logits = model.logits(states[valid], window.tokens[valid], window.actions[valid])
    target = window.next_tokens[valid]
    accuracy = (logits.detach().argmax(-1) == target).float().mean()
    return next_token_loss(logits, target).mean(), accuracy, states.detach()
