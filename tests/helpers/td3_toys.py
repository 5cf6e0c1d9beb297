"""Small models of TD3+BC on the toy task, and a policy of LIBERO's sizes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from toy_env import ToyReach

from vla_gym_trainers import TD3BC, TD3Config
from vla_gym_trainers.td3.policy import RLTokenPolicy

SMALL: dict[str, Any] = {
    "learning_starts": 16,
    "critic_warmup_steps": 5,
    "batch_size": 16,
    "net_arch": (16,),
}


def td3_bc(env: Any = None, seed: int = 1, **changes: Any) -> TD3BC:
    """Make an untrained one; ``changes``: numbers of its TD3Config that are not ``SMALL``."""
    return TD3BC("RLTokenPolicy", env or ToyReach(), TD3Config(**{**SMALL, **changes}), seed=seed)


def save_policy(folder: Path, *, chunk_len: int = 8, token_dim: int = 256) -> None:
    """Write an untrained policy of TD3+BC for LIBERO and a mini VLA into a run's folder."""
    box = partial(spaces.Box, -np.inf, np.inf, dtype=np.float32)
    action = spaces.Box(-1.0, 1.0, (chunk_len, 7), np.float32)
    observed = {"rl_token": box((token_dim,)), "vla_action": action, "proprio": box((8,))}
    space = spaces.Dict({**observed, "task_id": spaces.Discrete(10)})
    policy = RLTokenPolicy(space, action, lambda _: 1e-3, TD3Config(net_arch=(8,)))
    policy.save(folder / "policy.safetensors")
