"""Thin trainers on top of vla_gym: TD3+BC as a stable-baselines3 algorithm, and pretraining.

Importing this package is cheap; the heavy parts are imported on first use::

    from vla_gym_trainers import TD3BC, evaluate
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_gym_trainers.buffers import ChunkReplayBuffer
    from vla_gym_trainers.evaluate import evaluate
    from vla_gym_trainers.policies import RLTokenPolicy
    from vla_gym_trainers.td3bc import TD3BC
    from vla_gym_trainers.train_td3 import TD3Config, train_td3

_EXPORTS = {
    "ChunkReplayBuffer": "buffers",
    "RLTokenPolicy": "policies",
    "TD3BC": "td3bc",
    "TD3Config": "train_td3",
    "evaluate": "evaluate",
    "train_td3": "train_td3",
}
__all__ = ["TD3BC", "ChunkReplayBuffer", "RLTokenPolicy", "TD3Config", "evaluate", "train_td3"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_EXPORTS[name]}")
    return getattr(module, name)
