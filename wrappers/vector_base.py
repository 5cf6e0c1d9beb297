"""What the vector wrappers of observations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar, cast

import gymnasium as gym
import numpy as np

Obs = dict[str, Any]
Step = tuple[Obs, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]

_Method = TypeVar("_Method", bound=Callable[..., Any])


class VectorObservationWrapper(
    gym.vector.VectorWrapper[Obs, np.ndarray, Obs, np.ndarray, np.ndarray]
):
    """Converts the observations of any vector environment, ``LiberoVectorEnv`` included.

    Gymnasium's class of this name refuses the autoreset mode SAME_STEP and knows neither
    ``step_wait`` nor ``recv``. Every attribute that a subclass does not have (``send``,
    ``groups``, ``call``, ``get_attr``, ``set_attr``, ...) is that of the wrapped environment.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Obs, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``.

        Rows of the others hold what was made of their last observation.
        """
        mask = None if options is None else options.get("reset_mask")
        # A copy: Gymnasium's own vector environments take the mask out of the caller's dict.
        options = None if options is None else dict(options)
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        env_ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        return self._convert_reset(obs, infos, env_ids)

    def step(self, actions: np.ndarray) -> Step:
        """Step all environments and convert what they return."""
        return self._convert_step(self.env.step(actions))

    def step_wait(self, timeout: float | None = None) -> Step:
        """Wait for what ``step_async`` began, and convert it.

        Args:
            timeout: In seconds; see the wrapped environment.
        """
        env: Any = self.env
        return self._convert_step(env.step_wait(timeout=timeout))

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        env_ids: Sequence[int] | np.ndarray | None = None,
    ) -> Step:
        """Wait for environments that ``send`` or ``reset_send`` began, and convert their rows.

        Args:
            min_envs: How many to wait for; see the wrapped environment.
            timeout: In seconds.
            env_ids: Wait for these; see the wrapped environment.

        Returns:
            What ``step`` returns, with one row for each finished environment, sorted by
            ``infos["env_id"]``. Nothing is computed for the others.
        """
        env: Any = self.env
        return self._convert_step(env.recv(min_envs=min_envs, timeout=timeout, env_ids=env_ids))

    def _convert_reset(
        self, obs: Obs, infos: dict[str, Any], env_ids: np.ndarray
    ) -> tuple[Obs, dict[str, Any]]:
        """Convert what a reset of the environments ``env_ids`` returned, with rows for all."""
        raise NotImplementedError

    def _convert_step(self, result: Step) -> Step:
        """Convert a step; ``infos["env_id"]`` says which rows it has, without it all."""
        raise NotImplementedError

    def _env_ids(self, infos: dict[str, Any]) -> np.ndarray:
        """Return the environment of each row of a step."""
        return np.asarray(infos.get("env_id", np.arange(self.num_envs)))


def if_env_has(method: _Method) -> _Method:
    """Mark a method that a wrapper has only where the wrapped environment has it.

    Whoever asks ``hasattr(envs, "send")`` gets the wrapped environment's answer.
    """
    return cast(_Method, _IfEnvHas(method))


class _IfEnvHas:
    """The descriptor behind :func:`if_env_has`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self._method
        getattr(wrapper.env, self._method.__name__)  # raises AttributeError
        return MethodType(self._method, wrapper)
