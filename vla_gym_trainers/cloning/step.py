"""One step of behaviour cloning: losses, update, validation."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch.nn import functional as F

from vla_gym.vla.base import GRIPPER
from vla_gym.vla.mini.model import MiniVLA, to_pixel_values
from vla_gym.vla.tokens import NUM_BINS, UNK, actions_to_bins
from vla_gym_trainers.cloning.config import MiniConfig
from vla_gym_trainers.cloning.data import DemoSet, Sentences, random_shift
from vla_gym_trainers.cloning.state import CloningState


def cloning_loss(
    actions: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor,
    config: MiniConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L1 loss and the token cross-entropy, both without steps after the episode.

    Of the L1 head's actions (B, C, 7) and the token head's logits (B, C, 7, 256), for the expert's
    actions (B, C, 7) where ``valid`` (B, C).
    """
    weight = torch.ones(target.shape[-1], device=target.device)
    weight[GRIPPER] = config.gripper_loss_weight
    mask = valid.float()[..., None]
    count = mask.sum().clamp(min=1.0) * target.shape[-1]
    l1 = ((actions.float() - target).abs() * weight * mask).sum() / count
    labels = _token_labels(target, config)
    if config.token_distillation > 0.0:
        labels = labels.lerp(
            _token_labels(actions.detach().float(), config), config.token_distillation
        )
    entropy = F.cross_entropy(logits.float().flatten(0, 2), labels, reduction="none")
    return l1, (entropy.view(target.shape) * mask).sum() / count


def flow_loss(
    model: MiniVLA,
    hidden: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor,
    draws: int,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Return the flow head's squared error, without steps after the episode.

    ``|v(h, x_t, t) - (a - n)|^2`` on ``x_t = (1 - t) n + t a`` with n ~ N(0, I), t ~ U(0, 1) and
    standardised actions a (flow matching, Lipman et al. 2023, eq. 23), as many draws of n and t for
    each row; h are the states (B, C, H) of the action queries.
    """
    assert model.flow_head is not None
    mean, std = (target.new_tensor(x) for x in (model.config.action_mean, model.config.action_std))
    actions = ((target - mean) / std).repeat(draws, 1, 1)
    noise = torch.from_numpy(rng.standard_normal(actions.shape, np.float32)).to(actions)
    time = torch.from_numpy(rng.random(len(actions), np.float32)).to(actions)
    noisy = torch.lerp(noise, actions, time[:, None, None])
    velocity = model.flow_head(hidden.repeat(draws, 1, 1), noisy, time)
    mask = valid.float().repeat(draws, 1)[..., None]
    error = (velocity - (actions - noise)).square() * mask
    return error.sum() / (mask.sum().clamp(min=1.0) * target.shape[-1])


def _losses(
    model: MiniVLA,
    seen: tuple[np.ndarray, torch.Tensor, np.ndarray],
    chunks: tuple[np.ndarray, np.ndarray],
    config: MiniConfig,
    rng: np.random.Generator,
) -> dict[str, torch.Tensor]:
    """Return the losses by name, the flow head's if there is one.

    Of what was ``seen``, images, word ids and proprioception, and of :meth:`DemoSet.chunks`.
    """
    images, ids, proprio = seen
    hidden = model(
        to_pixel_values(images).to(config.device),
        ids.to(config.device),
        torch.from_numpy(proprio).to(config.device),
    )
    target, valid = (torch.from_numpy(array).to(config.device) for array in chunks)
    logits = model.token_logits(hidden)
    l1, entropy = cloning_loss(model.action_head(hidden), logits, target, valid, config)
    losses = {"l1": l1, "token_cross_entropy": entropy}
    if model.flow_head is not None:
        losses["flow"] = flow_loss(model, hidden, target, valid, config.flow_draws, rng)
    return losses


def _token_labels(actions: torch.Tensor, config: MiniConfig) -> torch.Tensor:
    """Return the distributions over bins (N, 256) that stand for actions (..., 7)."""
    bins = actions_to_bins(actions).flatten()
    return _smooth_labels(config.token_smoothing).to(bins.device)[bins]


@cache
def _smooth_labels(deviation: float) -> torch.Tensor:
    """Return (256, 256): row i is a Gaussian around bin i, cut off at both ends, of sum 1."""
    if deviation == 0.0:
        return torch.eye(NUM_BINS)
    bins = torch.arange(NUM_BINS, dtype=torch.float32)
    rows = torch.exp(-0.5 * ((bins - bins[:, None]) / deviation) ** 2)
    return rows / rows.sum(dim=1, keepdim=True)


def train_step(
    state: CloningState, demos: DemoSet, sentences: Sentences, config: MiniConfig, bf16: bool
) -> dict[str, float]:
    """Draw a batch, take one optimiser step, update the average; return the losses by name."""
    index = demos.sample(state.rng, config.batch_size)
    chunks = demos.chunks(index, state.model.config.horizon)
    images = random_shift(demos.images[index], config.shift_pixels, state.rng)
    proprio = demos.proprio[index]
    noise = state.rng.normal(size=proprio.shape) * config.proprio_noise
    proprio = proprio + (noise * state.model.config.proprio_std).astype(np.float32)
    ids = sentences.draw(demos.task[index], config.paraphrase_rate, state.rng)
    # The unknown word in place of some, so that its embedding is trained.
    drop = torch.from_numpy(state.rng.random(tuple(ids.shape)) < config.word_dropout)
    ids = ids.masked_fill(drop & (ids > 0), state.model.config.vocabulary.index(UNK))
    with torch.autocast(config.device.split(":")[0], torch.bfloat16, enabled=bf16):
        losses = _losses(state.model, (images, ids, proprio), chunks, config, state.rng)
    weights = {"token_cross_entropy": config.token_loss_weight, "flow": config.flow_loss_weight}
    state.optimizer.zero_grad()
    torch.stack([weights.get(name, 1.0) * loss for name, loss in losses.items()]).sum().backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    state.step += 1
    # Early on, the average must forget the fresh weights faster.
    decay = min(config.ema, (1 + state.step) / (10 + state.step))
    with torch.no_grad():
        average: list[torch.Tensor] = list(state.ema.parameters())
        current: list[torch.Tensor] = list(state.model.parameters())
        torch._foreach_lerp_(average, current, 1.0 - decay)
    return {name: float(loss.detach()) for name, loss in losses.items()}


@torch.no_grad()
def validate(
    model: MiniVLA, demos: DemoSet, sentences: Sentences, config: MiniConfig
) -> dict[str, float]:
    """Return losses on 512 frames of the held-out episodes; empty if there are none."""
    index = demos.held_out(512)
    totals: dict[str, float] = {}
    rng = np.random.default_rng(0)  # the same noise at every validation
    for part in np.array_split(index, max(1, math.ceil(len(index) / 64))):
        if len(part) == 0:
            return {}
        seen = demos.images[part], sentences.originals(demos.task[part]), demos.proprio[part]
        chunks = demos.chunks(part, model.config.horizon)
        losses = _losses(model, seen, chunks, config, rng)
        for name, loss in losses.items():
            totals[name] = totals.get(name, 0.0) + len(part) * float(loss)
    return {f"val/{name}": total / len(index) for name, total in totals.items()}
