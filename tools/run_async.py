"""Make two rows of "A slow VLA" of docs/results.md: PPO in turn and asynchronous, else the same.

Usage: python tools/run_async.py --factor 5 --seed 0

The embedded VLA is slowed down by sleeping, as if it were computed elsewhere: over a rollout that
is collected in turn it takes ``factor`` times as long as the simulation does. How long that is, is
measured first, once for all runs (RUNS/async/machine.json). Run again after a stop, it goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from contextlib import closing, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import make_results_page
import numpy as np
import torch
import tyro

from vla_gym.vla import load
from vla_gym.vla.base import TokenOutput
from vla_gym.vla.mini import MiniBackend
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributed import World
from vla_gym_trainers.on_policy.parts import libero_worlds, make_collector, make_parts
from vla_gym_trainers.on_policy.source import Order, RolloutSource
from vla_gym_trainers.runs.result_card import write_json
from vla_gym_trainers.runs.settings import load_preset

MODES = {"in-turn": False, "asynchronous": True}


@dataclass
class AsyncConfig:
    """PPO on one task with a slow VLA, in turn and asynchronous."""

    factor: float = 1.0
    """Seconds in the VLA for a second of simulation."""
    seed: int = 0
    """Of the run."""
    task_id: int = 5
    """Of libero_goal."""
    total_steps: int = 80_000
    """Control steps of each run."""
    runs: Path = Path(os.environ.get("RUNS", "runs"))
    """Where runs are kept; default: RUNS, else runs."""


class SlowBackend(MiniBackend):
    """Sleeps ``delay`` seconds for each row when it acts; learning is as fast as ever."""

    delay = 0.0

    def token_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> TokenOutput:
        """See :class:`MiniBackend`."""
        if not torch.is_grad_enabled():
            time.sleep(self.delay * len(instructions))
        return super().token_outputs(images, instructions, proprio)


def settings(config: AsyncConfig, mode: str) -> PPOConfig:
    """Return the settings of one run."""
    return dataclasses.replace(
        load_preset(PPOConfig, "ppo_goal"),
        task_ids=(config.task_id,),
        num_envs=16,
        episodes_per_env=1,
        overlap=False,
        asynchronous=MODES[mode],
        total_steps=config.total_steps,
        max_minutes=None,
        eval_every=0,
        seed=config.seed,
        progress=False,
    )


def measure(config: PPOConfig) -> dict[str, float]:
    """Return seconds of simulation and of the VLA a chunk, collected in turn."""
    parts = make_parts(config)
    worlds = libero_worlds(config, parts)
    with closing(worlds.train()) as envs:
        collector = make_collector(config, parts.policy, envs, worlds, World())
        with closing(RolloutSource(collector, parts.policy)) as source:
            for seed in (1, 2):  # the first one compiles the scene
                rollout = source.collect(Order(seed, 0, lambda policy: policy))
    chunks = int(rollout.data["valid"].sum())
    return {
        "simulation": rollout.seconds["environment"] / chunks,
        "forward": rollout.seconds["forward"] / chunks,
    }


def main(config: AsyncConfig) -> None:
    """Make both runs and their rows."""
    folder = config.runs / "async"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    machine = folder / "machine.json"
    if not machine.exists():
        write_json(machine, measure(settings(config, "in-turn")))
    seconds: dict[str, Any] = json.loads(machine.read_text())
    vla: Any = load("mini-few")
    slow = SlowBackend(vla.model, vla.name)
    slow.delay = max(0.0, config.factor * seconds["simulation"] - seconds["forward"])
    with redirect_stderr(StringIO()):  # SB3 imports the old `gym`, which prints a banner
        from vla_gym_trainers.on_policy.train import train
    for mode in MODES:
        name = f"slow{config.factor:g}-{mode}-s{config.seed}"
        run = folder / name
        wanted = dataclasses.replace(settings(config, mode), run_dir=run)
        if not (run / "card.json").exists():
            train(wanted, resume=(run / "config.json").exists(), vla=slow)
        slowness = {"factor": config.factor, "delay": slow.delay, **seconds}
        make_results_page.add_async(name, run, slowness)
    make_results_page.update()


if __name__ == "__main__":
    main(tyro.cli(AsyncConfig, description=__doc__))
