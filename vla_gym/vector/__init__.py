"""The vector environment: many environments over worker processes that may die."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_gym.vector.env_row import EnvRowState
    from vla_gym.vector.vector_env import LiberoVectorEnv

__all__ = ["LiberoVectorEnv", "EnvRowState"]


def __getattr__(name: str) -> Any:
    # Lazy: the server of the workers, ``processes.server``, needs none of this.
    if name == "LiberoVectorEnv":
        from vla_gym.vector.vector_env import LiberoVectorEnv

        return LiberoVectorEnv
    if name == "EnvRowState":
        from vla_gym.vector.env_row import EnvRowState

        return EnvRowState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
