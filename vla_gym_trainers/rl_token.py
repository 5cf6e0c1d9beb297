"""Pretraining of the RL token: ``vla-gym-train rl-token``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vla_gym.errors import ConfigError
from vla_gym.rl_token import (
    RLTokenDecoder,
    RLTokenEncoder,
    RLTokenModelConfig,
    explained_variance,
    reconstruction_loss,
)
from vla_gym.vla import FrozenVLA, load
from vla_gym_trainers.mini_data import demo_files, read_demo_file


@dataclass
class RLTokenConfig:
    """Options of ``vla-gym-train rl-token``."""

    vla: str = "mini"
    """VLA whose hidden states are compressed: a name or a folder."""
    demos: str | None = "demos"
    """Folder of demonstrations whose frames the VLA looks at; None for none."""
    frame_stride: int = 4
    """Use every so many frames of the demonstrations; neighbours hardly differ."""
    rollout_episodes: int = 0
    """Also play so many episodes a task with the VLA itself, on sampled layouts."""
    rollout_noise: float = 0.3
    """Action noise of those episodes, so that states beside the VLA's path are known too."""
    output: str = "runs/rl-token"
    """Run directory: TensorBoard, model/ (encoder and decoder, float16), result.json."""
    dim: int = 256
    """Size D of the RL token."""
    width: int = 128
    """Width of the encoder's and the decoder's transformer."""
    layers: int = 2
    """Blocks of the encoder, and of the decoder."""
    context_dropout: float = 0.5
    """Share of examples whose decoder sees the token alone."""
    steps: int = 3000
    """Optimiser steps."""
    batch_size: int = 128
    """Observations per step."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW; cosine to zero after 100 steps of warm-up."""
    held_out: float = 0.1
    """Share of the hidden states (a contiguous block a source) kept for the report."""
    device: str = "cpu"
    """Torch device."""
    threads: int = 1
    """Torch threads."""
    seed: int = 0
    """Seed of weights, batches and rollouts."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If there is no source of hidden states or a value is out of range.
        """
        if self.demos is None and self.rollout_episodes < 1:
            raise ConfigError("Give a folder of demonstrations, or rollout_episodes >= 1.")
        if not 0.0 < self.held_out < 1.0:
            raise ConfigError(f"Expected 0 < held_out < 1, got {self.held_out}.")
        if min(self.steps, self.batch_size, self.frame_stride, self.threads) < 1:
            raise ConfigError("steps, batch_size, frame_stride and threads must be positive.")


def hidden_of_demos(vla: FrozenVLA, folder: str | Path, stride: int) -> dict[str, torch.Tensor]:
    """Return the VLA's hidden states (N, M, H) on every ``stride``-th frame, per instruction.

    Raises:
        ConfigError: If there are no demonstrations.
    """
    result = {}
    for path in tqdm(demo_files(folder), desc="hidden states of demonstrations", unit="task"):
        images, proprio, _, _, instruction = read_demo_file(path, None)
        parts = []
        for start in range(0, len(images), 64 * stride):
            rows = slice(start, start + 64 * stride, stride)
            batch = {"agentview": images[rows, 0], "wrist": images[rows, 1]}
            count = len(batch["wrist"])
            parts.append(vla.infer(batch, [instruction] * count, proprio[rows]).hidden.cpu())
        result[instruction] = torch.cat(parts)
    return result


def hidden_of_rollouts(
    vla: FrozenVLA, instructions: list[str], episodes: int, noise: float, seed: int
) -> dict[str, torch.Tensor]:
    """Return hidden states (N, M, H) of the VLA's own noisy episodes, per instruction."""
    from vla_gym_trainers.vla_rollout import play_episodes, tasks_of_instructions

    tasks = tasks_of_instructions(instructions)
    parts: dict[str, list[torch.Tensor]] = {}
    bar = tqdm(total=len(tasks) * episodes, desc="hidden states of rollouts", unit="episode")
    for episode in play_episodes(vla, tasks, episodes, seed=seed, noise=noise):
        parts.setdefault(f"rollout: {episode.task.instruction}", []).append(episode.hidden)
        bar.update()
    bar.close()
    return {key: torch.cat(value) for key, value in parts.items()}


def split_sources(
    sources: dict[str, torch.Tensor], held_out: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split every source's states into a first training and a last held-out block.

    Random frames would put neighbours of each held-out state into training.
    """
    train, rest = [], []
    for states in sources.values():
        cut = max(1, round(len(states) * (1.0 - held_out)))
        train.append(states[:cut])
        rest.append(states[cut:])
    return torch.cat(train), torch.cat(rest)


@torch.no_grad()
def report(
    encoder: RLTokenEncoder, decoder: RLTokenDecoder, hidden: torch.Tensor
) -> dict[str, float]:
    """Measure the reconstruction of held-out states in several ways.

    ``token``: from the token alone, nothing else in sight. ``context``: teacher-forced, token
    and previous states. ``context_wrong_token``: the same with other observations' tokens; the
    distance to ``context`` says how much the decoder uses the token when it could do without.
    ``generated``: from the token and its own previous predictions.

    Args:
        encoder: Trained encoder.
        decoder: Trained decoder.
        hidden: (N, M, H) states that were not trained on.

    Returns:
        ``<way>_mse`` (in standardised units) and ``<way>_explained_variance``.
    """
    encoder.eval()
    decoder.eval()
    states = encoder.standardise(hidden)
    token = encoder.encode(hidden)
    everyone = torch.ones(len(token), dtype=torch.bool, device=token.device)
    ways = {
        "token": decoder(token, states, drop=everyone),
        "context": decoder(token, states, drop=~everyone),
        "context_wrong_token": decoder(token.roll(len(token) // 2, 0), states, drop=~everyone),
        "generated": decoder.generate(token, states.shape[1]),
    }
    result = {}
    for way, predicted in ways.items():
        result[f"{way}_mse"] = float(reconstruction_loss(predicted, states))
        result[f"{way}_explained_variance"] = explained_variance(predicted, states)
    return result


def fit(
    hidden: torch.Tensor, config: RLTokenConfig, writer: SummaryWriter | None = None
) -> tuple[RLTokenEncoder, RLTokenDecoder]:
    """Train encoder and decoder together on hidden states (N, M, H).

    Loss: :func:`~vla_gym.rl_token.reconstruction_loss` of the decoder's prediction against the
    standardised states, which are constants (the VLA is frozen).
    """
    torch.manual_seed(config.seed)
    sizes = RLTokenModelConfig(
        hidden_size=hidden.shape[2],
        max_tokens=hidden.shape[1],
        dim=config.dim,
        width=config.width,
        encoder_layers=config.layers,
        decoder_layers=config.layers,
        context_dropout=config.context_dropout,
    )
    encoder, decoder = RLTokenEncoder(sizes), RLTokenDecoder(sizes)
    encoder.fit_scale(hidden)
    encoder.to(config.device).train()
    decoder.to(config.device).train()
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(config.seed)
    bar = tqdm(range(config.steps), desc="rl-token", unit="it")
    for step in bar:
        warm = min(1.0, (step + 1) / 100)
        cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * warm * cosine
        index = torch.randint(len(hidden), (config.batch_size,), generator=generator)
        batch = hidden[index].to(config.device)
        states = encoder.standardise(batch)
        loss = reconstruction_loss(decoder(encoder(batch), states), states)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            if writer is not None:
                writer.add_scalar("train/reconstruction_mse", loss.item(), step)
    return encoder, decoder


def train_rl_token(config: RLTokenConfig) -> dict[str, Any]:
    """Collect hidden states, train, report; return (and write) the report.

    Raises:
        ConfigError: If there are no demonstrations.
        WeightsError: If the VLA cannot be loaded.
    """
    torch.set_num_threads(config.threads)
    vla = load(config.vla, device=config.device)
    sources: dict[str, torch.Tensor] = {}
    if config.demos is not None:
        sources |= hidden_of_demos(vla, config.demos, config.frame_stride)
    if config.rollout_episodes:
        from vla_gym.suites import SUITES, suite_tasks

        known = list(sources) or [t.instruction for s in SUITES for t in suite_tasks(s)]
        sources |= hidden_of_rollouts(
            vla, known, config.rollout_episodes, config.rollout_noise, 20_000 + config.seed
        )
    train, rest = split_sources(sources, config.held_out)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    with SummaryWriter(str(output)) as writer:
        encoder, decoder = fit(train, config, writer)
        result: dict[str, Any] = {"train_states": len(train), "held_out_states": len(rest)}
        result |= report(encoder, decoder, rest.to(config.device))
        for key, value in result.items():
            if np.isscalar(value):
                writer.add_scalar(f"val/{key}", value, config.steps)
    encoder.save_pretrained(output / "model", decoder)
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result
