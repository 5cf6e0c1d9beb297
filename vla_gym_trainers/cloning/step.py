"""One step of behaviour cloning: losses, update, validation."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from vla_gym.vla.mini import GRIPPER, MiniVLA, to_pixel_values
from vla_gym.vla.tokens import NUM_BINS, UNK, actions_to_bins
from vla_gym_trainers.cloning.config import MiniConfig
from vla_gym_trainers.cloning.data import DemoSet, drop_words, random_shift
from vla_gym_trainers.cloning.sentences import Sentences
from vla_gym_trainers.cloning.state import CloningState


def cloning_loss(
    actions: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor,
    config: MiniConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L1 loss and the token cross-entropy, both without steps after the episode.

    Args:
        actions: (B, C, 7) of the L1 head.
        logits: (B, C, 7, 256) of the token head.
        target: (B, C, 7) expert actions.
        valid: (B, C) bool.
        config: For ``gripper_loss_weight`` and the labels of the tokens.
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


def use_bf16(precision: str, device: str) -> bool:
    """Resolve ``precision="auto"``: bf16 on CUDA and on CPUs with the instructions."""
    if precision != "auto":
        return precision == "bf16"
    if device.startswith("cuda"):
        return True
    # Torch before 2.13 cannot tell; float32 is always right, only slower.
    ask = getattr(torch.cpu, "get_capabilities", None)
    capabilities: dict[str, Any] = {} if ask is None else ask()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def train_step(
    state: CloningState, demos: DemoSet, sentences: Sentences, config: MiniConfig, bf16: bool
) -> tuple[float, float]:
    """Draw a batch, take one optimiser step, update the average; return both losses."""
    index = demos.sample(state.rng, config.batch_size)
    target, valid = demos.chunks(index, state.model.config.horizon)
    images = random_shift(demos.images[index], config.shift_pixels, state.rng)
    proprio = demos.proprio[index]
    noise = state.rng.normal(size=proprio.shape) * config.proprio_noise
    proprio = proprio + (noise * state.model.config.proprio_std).astype(np.float32)
    unknown = state.model.config.vocabulary.index(UNK)
    ids = sentences.draw(demos.task[index], config.paraphrase_rate, state.rng)
    ids = drop_words(ids, config.word_dropout, unknown, state.rng)
    device = config.device
    with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=bf16):
        out = state.model(
            to_pixel_values(images).to(device),
            ids.to(device),
            torch.from_numpy(proprio).to(device),
            with_tokens=True,
        )
    l1, entropy = cloning_loss(
        out.actions,
        out.token_logits,
        torch.from_numpy(target).to(device),
        torch.from_numpy(valid).to(device),
        config,
    )
    state.optimizer.zero_grad()
    (l1 + config.token_loss_weight * entropy).backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    state.step += 1
    # Early on, the average must forget the fresh weights faster.
    decay = min(config.ema, (1 + state.step) / (10 + state.step))
    with torch.no_grad():
        average: list[torch.Tensor] = list(state.ema.parameters())
        current: list[torch.Tensor] = list(state.model.parameters())
        torch._foreach_lerp_(average, current, 1.0 - decay)
    return float(l1.detach()), float(entropy.detach())


@torch.no_grad()
def validate(
    model: MiniVLA, demos: DemoSet, sentences: Sentences, config: MiniConfig, limit: int = 512
) -> dict[str, float]:
    """Return losses on frames of the held-out episodes; empty if there are none."""
    index = demos.held_out(limit)
    totals = np.zeros(2)
    for part in np.array_split(index, max(1, math.ceil(len(index) / 64))):
        if len(part) == 0:
            return {}
        target, valid = demos.chunks(part, model.config.horizon)
        out = model(
            to_pixel_values(demos.images[part]).to(config.device),
            sentences.originals(demos.task[part]).to(config.device),
            torch.from_numpy(demos.proprio[part]).to(config.device),
            with_tokens=True,
        )
        losses = cloning_loss(
            out.actions,
            out.token_logits,
            torch.from_numpy(target).to(config.device),
            torch.from_numpy(valid).to(config.device),
            config,
        )
        totals += len(part) * np.array([float(x) for x in losses])
    l1, entropy = totals / len(index)
    return {"val/l1": float(l1), "val/token_cross_entropy": float(entropy)}
