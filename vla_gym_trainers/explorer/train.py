"""``vla-gym-train explorer`` and ``adversarial``: F1's phases 2 and 3, on the on-policy trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym_trainers.explorer.config import AdversarialConfig, ExplorerConfig
from vla_gym_trainers.explorer.loop import AdversarialLoop, ExplorerLoop
from vla_gym_trainers.on_policy.networks import EnvFactories
from vla_gym_trainers.on_policy.train import train
from vla_gym_trainers.runs.run import TrainingRun
from vla_gym_trainers.world_model.data import Sequences


def main(config: ExplorerConfig) -> str:
    """Run ``vla-gym-train explorer | adversarial``; return what is printed."""
    run = train_explorer(config)
    if not run.card:  # a further process of a data-parallel run
        return ""
    lines = []
    if found := run.card["results"].get("behaviours"):
        lines = format_behaviours(found, run.card["results"].get("behaviours_before"))
    return "\n".join([*lines, f"run directory: {run.run_dir}"])


def train_explorer(
    config: ExplorerConfig, *, vla: Any = None, envs: EnvFactories | None = None
) -> TrainingRun:
    """Train phase 2, or phase 3 by its settings, and write the result card.

    A VLA may take the place of the one that the configuration names, and environments that of
    LIBERO's; nothing is filmed and compared then.

    Raises:
        ConfigError: If a phase before is missing, or settings do not fit each other.
        WeightsError: If a checkpoint is damaged.
    """
    config = config if config.resume else config.resolved()
    kind: Callable[..., ExplorerLoop] = ExplorerLoop
    if isinstance(config, AdversarialConfig):
        kind = partial(AdversarialLoop, taught=_taught(config))
    return train(config, vla=vla, envs=envs, kind=kind)


def _taught(config: AdversarialConfig) -> Sequences | None:
    """Return phase 1's training data; None if the world model is not reminded of them."""
    if not config.teacher_share:
        return None
    folder = Path(str(config.teacher))
    found = [p / "data" / "train.npz" for p in (folder, folder.parent)]
    path = next((p for p in found if p.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{folder} has no data/train.npz of phase 1, which the world model is reminded of: "
            "give --teacher RUN of 'vla-gym-train world-model', or --teacher-share 0."
        )
    return Sequences.load(path)


def format_behaviours(
    found: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]] | None = None
) -> list[str]:
    """Return lines of a table: what the world model makes of behaviours, and their coverage."""
    columns = {
        "error": "prediction_error",
        "unsure": "uncertainty",
        "moved": "memory_divergence",
        "cells": "coverage",
        "objects": "object_coverage",
    }
    lines = ["".join([f"{'':10}", *(f"{name:>10}" for name in columns)])]
    if before is not None:
        lines[0] += f"{'error before':>14}"
    for name, row in found.items():
        line = f"{name:10}" + "".join(f"{row[key]:10.4f}" for key in columns.values())
        if before is not None:
            line += f"{before[name]['prediction_error']:14.4f}"
        lines.append(line)
    return lines
