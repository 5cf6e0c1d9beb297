"""The vector environment: many environments over worker processes that may die."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_gym.vector.env_row import EnvRowState
    from vla_gym.vector.vector_env import LiberoVectorEnv

__all__ = ["LiberoVectorEnv", "EnvRowState"]
# Lazy: the server of the workers, ``processes.server``, needs none of this.
_MODULES = {"LiberoVectorEnv": "vector_env", "EnvRowState": "env_row"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
