"""Small models of TD3+BC on the toy task."""

from __future__ import annotations

from typing import Any

from toy_env import ToyReach

from vla_gym_trainers import TD3BC, TD3Config

SMALL: dict[str, Any] = {
    "learning_starts": 16,
    "critic_warmup_steps": 5,
    "batch_size": 16,
    "net_arch": (16,),
}


def td3_bc(env: Any = None, seed: int = 1, **changes: Any) -> TD3BC:
    """Make an untrained one; ``changes``: numbers of its TD3Config that are not ``SMALL``."""
    return TD3BC("RLTokenPolicy", env or ToyReach(), TD3Config(**{**SMALL, **changes}), seed=seed)
