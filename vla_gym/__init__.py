"""LIBERO as a Gymnasium environment with a frozen vision-language-action model (VLA) inside.

Importing this package registers the environment ids and does nothing else::

    import gymnasium, vla_gym

    env = gymnasium.make("Libero-goal-v0", task_ids=8)  # images, proprioception, 7-D actions
    env = gymnasium.make("LiberoVLA-goal-v0", task_ids=8)  # RL token + the VLA's own action chunk
"""

import importlib
from typing import Any

from vla_gym.envs.registration import register_envs
from vla_gym.variation import DomainVariation

__all__ = ["DomainVariation"]
__version__ = "0.1.0"

# Imported when first used, so that importing the package stays cheap.
_LAZY = ("vector", "vla", "wrappers")

register_envs()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
