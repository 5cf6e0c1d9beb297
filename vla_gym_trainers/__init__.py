"""Thin trainers on top of vla_gym: TD3+BC as a stable-baselines3 algorithm, and pretraining.

Importing this package is cheap; the heavy parts are imported on first use::

    from vla_gym_trainers import TD3BC
    from vla_gym_trainers.evaluation.trained import load_trained
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_gym_trainers.runs.sb3_vec_env import make_sb3_vec_env
    from vla_gym_trainers.td3.algorithm import TD3BC
    from vla_gym_trainers.td3.algorithm_config import TD3Config
    from vla_gym_trainers.td3.policy import RLTokenPolicy
    from vla_gym_trainers.td3.replay import ChunkReplayBuffer

_EXPORTS = {
    "ChunkReplayBuffer": "td3.replay",
    "RLTokenPolicy": "td3.policy",
    "TD3BC": "td3.algorithm",
    "TD3Config": "td3.algorithm_config",
    "make_sb3_vec_env": "runs.sb3_vec_env",
}
__all__ = ["TD3BC", "ChunkReplayBuffer", "RLTokenPolicy", "TD3Config", "make_sb3_vec_env"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_EXPORTS[name]}")
    return getattr(module, name)
