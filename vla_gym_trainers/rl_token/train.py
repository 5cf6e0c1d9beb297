"""Pretraining of the RL token: ``vla-gym-train rl-token``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from vla_gym.errors import ConfigError
from vla_gym.outside import Count, Fraction, OpenFraction, PositiveFloat, PositiveInt
from vla_gym.rl_token import RLTokenDecoder, RLTokenEncoder, RLTokenModelConfig
from vla_gym.vla import load
from vla_gym_trainers.rl_token.collect_states import states_of_demos, states_of_episodes
from vla_gym_trainers.rl_token.reconstruction import format_reports, report
from vla_gym_trainers.rl_token.vla_states import PLAYERS, StatesConfig, VLAStates
from vla_gym_trainers.rollout.episode_sets import join_episodes
from vla_gym_trainers.runs.result_card import machine_facts
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.settings import RunSettings
from vla_gym_trainers.runs.torch_helpers import set_cosine_rate

# States that scale and principal components are taken from.
SCALE_STATES = 4096


@dataclass
class RLTokenConfig(StatesConfig, RunSettings):
    """Pretrain the RL token of any VLA on states that it and disturbed experts come to.

    The run directory gets model/ (encoder and decoder, float16, with a README.md). A run takes
    minutes and has no checkpoints.
    """

    algorithm: ClassVar[str] = "rl-token"

    vla: str = "mini"
    """VLA whose hidden states are compressed, e.g. openvla-oft:/path?unnorm_key=libero_goal."""
    demos: str | None = None
    """Folder of demonstrations whose frames the VLA looks at too; None for none."""
    dim: int = 256
    """Size D of the RL token."""
    width: int = 128
    """Width of the encoder's and the decoder's transformer."""
    layers: PositiveInt = 2
    """Blocks of the encoder, and of the decoder."""
    linear_path: bool = True
    """Add a linear map of all hidden states, started at their principal components, to the
    readout."""
    linear_rank: Count = 0
    """Numbers that the linear map first makes of each hidden state. 0: it takes them as they are
    where an observation's states hold at most 65,536 numbers, else as many as make that, at most
    256."""
    context_dropout: Fraction = 0.5
    """Share of examples whose decoder sees the token alone."""
    compare_dropout: Fraction | None = None
    """Context dropout of a second token that is trained on the same states, for the card's report
    alone. None: no second token."""
    steps: PositiveInt = 1200
    """Optimiser steps."""
    batch_size: PositiveInt = 64
    """Observations per step."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW; cosine to zero after 100 steps of warm-up."""
    held_out_share: OpenFraction = 0.1
    """Share of every task's and player's episodes that the report is made on."""

    def check(self) -> None:
        """Check the values; see the base."""
        super().check()
        RLTokenModelConfig(2**24, 1, self.dim, self.width)
        if self.demos is None and max(self.expert_episodes, self.rollout_episodes) < 2:
            raise ConfigError(
                "Ask for two or more expert_episodes or rollout_episodes, or demos: one episode a "
                f"task is held out for the report. Got {self.expert_episodes} and "
                f"{self.rollout_episodes}."
            )
        if self.linear_rank and not self.linear_path:
            raise ConfigError(
                f"linear_rank {self.linear_rank} is of the linear path: leave it out, or "
                "no-linear-path."
            )


def main(config: RLTokenConfig) -> str:
    """Run ``vla-gym-train rl-token``; return the table that is printed."""
    return format_reports(train_rl_token(config))


def collect(config: RLTokenConfig) -> VLAStates:
    """Collect the states that the config asks for.

    Raises:
        ConfigError: If a value is out of range or there are no demonstrations.
        WeightsError: If the VLA cannot be loaded.
        WorkerError: If a worker dies or hangs.
    """
    vla = load(config.vla, device=config.device)
    if config.linear_rank > vla.hidden_size:
        raise ConfigError(
            f"Expected linear_rank of at most the VLA's hidden size {vla.hidden_size}, got "
            f"{config.linear_rank}: 0 has it chosen."
        )
    parts = []
    if config.demos is not None:
        parts.append(
            states_of_demos(vla, config.demos, config.frame_stride, progress=config.progress)
        )
    if config.expert_episodes + config.rollout_episodes:
        parts.append(states_of_episodes(vla, config))
    return join_episodes(parts)


def fit(
    hidden: torch.Tensor,
    config: RLTokenConfig,
    log: Callable[[dict[str, float], int], None] | None = None,
) -> tuple[RLTokenEncoder, RLTokenDecoder]:
    """Train encoder and decoder together.

    Loss: the decoder's mean squared error against the standardised states (N, M, H), which are
    constants (the VLA is frozen). ``log`` takes metrics and the step, every 50 steps.
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
        linear_path=config.linear_path,
        linear_rank=config.linear_rank,
    )
    encoder, decoder = RLTokenEncoder(sizes), RLTokenDecoder(sizes)
    some = hidden[:: max(1, len(hidden) // SCALE_STATES)]
    encoder.fit_scale(some)
    if sizes.linear_path:
        encoder.fit_linear_path(some)
    encoder.to(config.device).train()
    decoder.to(config.device).train()
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(config.seed)
    what = f"context dropout {config.context_dropout:g}"
    bar = tqdm(range(config.steps), what, unit="step", disable=not config.progress)
    for step in bar:
        set_cosine_rate(
            optimizer, step, config.steps, peak=config.learning_rate, warmup=100, floor=0.0
        )
        index = torch.randint(len(hidden), (config.batch_size,), generator=generator)
        batch = hidden[index].float().to(config.device)
        states = encoder.standardise(batch)
        loss = F.mse_loss(decoder(encoder(batch), states), states)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            if log is not None:
                log({"train/reconstruction_mse": loss.item()}, step)
    return encoder, decoder


def train_rl_token(config: RLTokenConfig) -> dict[str, Any]:
    """Collect states, train, report; return (and write) the result card.

    Raises:
        ConfigError: If a value is out of range, or there are too few episodes to hold some out.
        WeightsError: If the VLA cannot be loaded.
        WorkerError: If a worker dies or hangs.
    """
    config.check()
    torch.set_num_threads(config.threads)
    plays = config.expert_episodes + config.rollout_episodes > 0
    world = config.world_facts() if plays else {}
    with Run(config, total=config.steps) as run:
        states = collect(config)
        collected = run.seconds
        held = states.held_out(config.held_out_share)
        if not held.any():
            raise ConfigError("No episode is left to report on: ask for two or more a task.")
        train, rest = (states.select(rows) for rows in (~held, held))
        encoder, decoder = fit(train.hidden, config, run.log)
        folder = run.dir.path / "model"
        encoder.save_pretrained(folder, decoder)
        tokens = [_reported(config, encoder, decoder, rest.hidden)]
        run.log({f"val/{key}": value for key, value in tokens[0].items()}, config.steps)
        if config.compare_dropout is not None:
            second = replace(config, context_dropout=config.compare_dropout)
            tokens.append(_reported(second, *fit(train.hidden, second), rest.hidden))
        results = {
            "hidden_shape": list(states.hidden.shape[1:]),
            "states": {"train": _counts(train), "held_out": _counts(rest)},
            "tokens": tokens,
            "seconds": {
                "states": round(collected, 1),
                "training": round(run.seconds - collected, 1),
            },
        }
        card = run.write_card(results, {**world, **machine_facts()})
        (folder / "README.md").write_text(model_card(card), encoding="utf-8")
    return card


def _reported(
    config: RLTokenConfig, encoder: RLTokenEncoder, decoder: RLTokenDecoder, hidden: torch.Tensor
) -> dict[str, float]:
    return {"context_dropout": config.context_dropout} | report(encoder, decoder, hidden)


def _counts(states: VLAStates) -> dict[str, int]:
    """Return how many states and episodes there are, and how many states of each player."""
    counts = {"states": len(states), "episodes": len(np.unique(states.episode))}
    return counts | {name: int((states.player == i).sum()) for i, name in enumerate(PLAYERS)}


def model_card(card: dict[str, Any]) -> str:
    """Return the README.md of the encoder of :func:`train_rl_token`'s card."""
    config, results = card["config"], card["results"]
    vla = Path(config["vla"]).name
    count, size = results["hidden_shape"]
    train, held = (results["states"][key] for key in ("train", "held_out"))
    return (
        f"# {vla}-rl-token: the RL token of `{vla}`\n\n"
        f"Compresses the {count} x {size} hidden states of `{vla}` into {config['dim']} numbers "
        "(`vla_gym.rl_token`). The folder holds the encoder, which the environments use, and the "
        "decoder it was trained with, in float16. Made by `vla-gym-train rl-token` with seed "
        f"{config['seed']}, {config['steps']} steps of {config['batch_size']} states.\n\n"
        f"Hidden states: {train['states']} ({train['expert']} of scripted experts with noise, "
        f"{train['vla']} of the VLA with noise, {train['demos']} of recorded demonstrations), on "
        f"sampled layouts; what was played for it, with `{config['assets']}` assets. "
        f"Reconstruction of {held['states']} states of other episodes, as explained variance (mean "
        "squared error in standardised units); only the token of the first column is here:\n\n"
        f"{format_reports(card)}\n"
    )
