"""``vla-gym-train ppo | grpo`` from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_gym_trainers.on_policy.config import GRPOConfig, OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.train import train
from vla_gym_trainers.runs.presets import parse_config
from vla_gym_trainers.runs.settings import read_settings

ALGORITHMS: dict[str, type[OnPolicyConfig]] = {"ppo": PPOConfig, "grpo": GRPOConfig}


def command(algorithm: str, arguments: Sequence[str], resume: str | None = None) -> None:
    """Run a command.

    Args:
        algorithm: ``"ppo"`` or ``"grpo"``.
        arguments: Options.
        resume: Directory of a run to go on with.
    """
    kind, prog = ALGORITHMS[algorithm], f"vla-gym-train {algorithm}"
    saved: Any = None
    if resume is not None:
        saved = read_settings(Path(resume) / "config.json", kind)
        prog += " --resume"
    config = parse_config(kind, arguments, prog, default=saved)
    run = train(config, resume=resume is not None)
    if run.card:
        _print(run.card)
        sys.stdout.write(f"run directory: {run.run_dir}\n")


def _print(card: dict[str, Any]) -> None:
    training = card["results"]["training"]
    sys.stdout.write(
        f"{training['env_steps']:,} control steps, {training['rollouts']} rollouts, "
        f"{training['minutes']:.1f} minutes\n"
    )
    validation = card["results"].get("validation")
    if validation and validation["history"]:
        first, best = validation["history"][0][1], validation["best"]
        sys.stdout.write(f"sampled layouts, greedy: {first:.3f} at the start, best {best:.3f}\n")
