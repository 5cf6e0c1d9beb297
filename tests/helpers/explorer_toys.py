"""Explorers of the toy environment, paid by a tiny world model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from on_policy_toys import tiny_vla, toy_factories
from toy_token_env import GOAL

from vla_gym_trainers.explorer.train import train_explorer
from vla_gym_trainers.runs.run import TrainingRun
from vla_gym_trainers.world_model.model import GRUWorldModel

SMALL: dict[str, Any] = {
    "num_envs": 4,
    "workers": 0,
    "num_minibatches": 2,
    "learning_rate": 1e-2,
    "sigma": 0.3,
    "memory_size": 8,
    "history": 2,
    "bptt_length": 4,
    "eval_envs": 2,
    "eval_layouts": 2,
    "compare_episodes": 0,
    "progress": False,
}
ADVERSARIAL = {"world_updates": 3, "world_batch_size": 4, "world_bptt_length": 2}


class OwnWorldModel:
    """A world model of somebody's own, which offers the protocol and no more."""

    def __init__(self, model: GRUWorldModel) -> None:
        model.use_vla(tiny_vla())
        self._model = model

    @classmethod
    def from_pretrained(cls, path: str, device: str = "cpu") -> OwnWorldModel:
        return cls(GRUWorldModel.from_pretrained(path, device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def explore(kind: type[Any], folder: Path, **changes: Any) -> TrainingRun:
    """Run phase 2 or 3 on the toy."""
    config = kind(**{**SMALL, "run_dir": folder, **changes})
    return train_explorer(config, vla=tiny_vla(), envs=toy_factories(config, goal=GOAL))


def fake_run(folder: Path, setting: str) -> Path:
    """A run directory that has nothing but a setting which tells its command."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({setting: 1}))
    return folder
