"""``vla-gym-train ppo | grpo`` from the command line."""

from __future__ import annotations

import sys
from typing import Any

from vla_gym_trainers.on_policy.config import OnPolicyConfig
from vla_gym_trainers.on_policy.train import train


def command(config: OnPolicyConfig, resumed: bool) -> None:
    """Train and print the run's figures.

    Args:
        config: All settings.
        resumed: Go on with the run in ``config.run_dir``.
    """
    run = train(config, resume=resumed)
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
