"""A training run on the toy task in a process of its own, to be killed and resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_env import CHUNK_LEN, ToyReach, in_process

import vla_gym_trainers.td3.train as train_td3_module
from vla_gym_trainers.evaluation.run_player import RunPlayer
from vla_gym_trainers.runs import run_dir as run_dir_module
from vla_gym_trainers.runs.sb3_vec_env import sb3_vec_env
from vla_gym_trainers.runs.settings import load_run_settings
from vla_gym_trainers.td3.train import TD3RunConfig, train_td3

# Loaded before processes are forked from this one: the first optimiser imports torch's compiler.
torch.optim.Adam([torch.zeros(1, requires_grad=True)])
import torch.utils.tensorboard  # noqa: E402, F401

#: A short training with everything in it: 2 evaluations, 5 checkpoints.
TINY: dict[str, Any] = {
    "total_timesteps": 240,
    "learning_starts": 64,
    "critic_warmup_steps": 20,
    "batch_size": 16,
    "buffer_size": 300,
    "utd_ratio": 0.5,
    "num_envs": 2,
    "net_arch": (16,),
    "checkpoint_every": 48,
    "eval_every": 96,
    "eval_layouts": 2,
    "eval_states": 4,
    "progress": False,
}


def make_toy_vec(config: TD3RunConfig) -> Any:
    """Stand in for ``train_td3.make_vec``."""
    return sb3_vec_env(in_process(lambda _: ToyReach(gamma=config.gamma), config.num_envs))


def make_toy_player(config: Any = None) -> RunPlayer:
    """Stand in for ``train_td3.make_player``."""
    return RunPlayer(in_process(lambda _: ToyReach(), 2, "DISABLED"), CHUNK_LEN)


def tiny_arguments(**changes: Any) -> list[str]:
    """Return ``TINY`` without evaluations as arguments of ``vla-gym-train td3``."""
    settings = {**TINY, "eval_every": 0, "eval_states": 0, **changes}
    settings.pop("progress")
    settings["net_arch"] = settings["net_arch"][0]
    pairs = [[f"--{key.replace('_', '-')}", str(value)] for key, value in settings.items()]
    return ["--no-progress", *(word for pair in pairs for word in pair)]


def use_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``vla-gym-train td3`` train on the toy."""
    monkeypatch.setattr(train_td3_module, "make_player", make_toy_player)
    monkeypatch.setattr(train_td3_module, "make_vec", make_toy_vec)


def train(run_dir: str, changes: dict[str, Any], resume: bool, kill_in_save: int = 0) -> None:
    """Train or resume in this process.

    Args:
        run_dir: The run's folder.
        changes: Settings beside ``TINY``.
        resume: Go on with the run.
        kill_in_save: Kill the process while it writes its so-many-th file of a checkpoint.
    """
    torch.set_num_threads(1)
    train_td3_module.make_vec = make_toy_vec  # type: ignore[assignment]
    train_td3_module.make_player = make_toy_player  # type: ignore[assignment]
    if kill_in_save:
        sync, calls = run_dir_module.sync, iter(range(1, kill_in_save + 1))

        def killer(path: Path) -> None:
            if next(calls) == kill_in_save:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(path)

        run_dir_module.sync = killer  # type: ignore[assignment]
    if resume:
        train_td3(load_run_settings(Path(run_dir), TD3RunConfig))
    else:
        train_td3(TD3RunConfig(run_dir=Path(run_dir), **{**TINY, **changes}))
