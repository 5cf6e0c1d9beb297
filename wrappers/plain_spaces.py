"""Observations, actions and infos in the forms that every RL library takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.actions import as_action
from vla_gym.envs.checks import check_flag
from vla_gym.errors import ConfigError, InvalidActionError


class PlainForm:
    """How observations and actions are written plainly: shared by both PlainSpaces.

    Attributes:
        flat: Whether observations and actions are vectors.
        keys: Of the observation's entries that are kept, in order.
        observation_space: Of one environment.
        action_space: Of one environment.
        string_infos: Whether infos may hold texts.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        flat: bool,
        obs_keys: Sequence[str] | None,
        string_infos: bool,
    ) -> None:
        """Check the arguments, see :class:`PlainSpaces`.

        Raises:
            ConfigError: If one does not fit.
        """
        for name, value in (("flat", flat), ("string_infos", string_infos)):
            check_flag(value, name)
        self.flat, self.string_infos = flat, string_infos
        if not isinstance(observation_space, spaces.Dict):
            raise ConfigError(
                f"Expected a Dict observation, got {observation_space}: this environment's is "
                "plain already, leave out flat and obs_keys."
            )
        self.keys = _parse_keys(obs_keys, observation_space)
        fields = {key: observation_space[key] for key in self.keys}
        self._discrete = {k: s for k, s in fields.items() if isinstance(s, spaces.Discrete)}
        self._action_shape = action_space.shape
        self.action_space = action_space
        # Pairs: a mapping would be sorted.
        self.observation_space: gym.Space[Any] = spaces.Dict(list(fields.items()))
        if not flat:
            return
        for key, space in fields.items():
            if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary):
                raise ConfigError(
                    f"flat=True cannot make numbers of {key!r}, {space}: leave it out with "
                    "obs_keys."
                )
        if not isinstance(action_space, spaces.Box):
            raise ConfigError(f"flat=True expects a Box action space, got {action_space}.")
        self.observation_space = _as_vector(self.observation_space)
        self.action_space = _as_vector(action_space)

    def observations(self, obs: dict[str, Any]) -> Any:
        """Return B observations, given as a dict of (B, ...) arrays, in their plain form.

        Returns:
            A new (B, D) float32 array; without ``flat`` the dict of those entries that are kept.
        """
        if not self.flat:
            return {key: obs[key] for key in self.keys}
        parts = []
        for key in self.keys:
            values, space = np.asarray(obs[key]), self._discrete.get(key)
            if space is not None:
                values = values.reshape(-1, 1) == space.start + np.arange(space.n)
            parts.append(values.reshape(len(values), -1).astype(np.float32, copy=False))
        return np.concatenate(parts, axis=1)

    def observation(self, obs: dict[str, Any]) -> Any:
        """Return one observation in its plain form; a new (D,) float32 array with ``flat``."""
        if not self.flat:
            return self.observations(obs)
        return self.observations({key: np.asarray(obs[key])[None] for key in self.keys})[0]

    def actions(self, actions: Any, *leading: int) -> Any:
        """Return actions as the environment takes them.

        Args:
            actions: (*leading, n) as ``action_space``.
            *leading: Sizes before the action's own: none, or the number of environments.

        Raises:
            InvalidActionError: If they have another shape.
        """
        if not self.flat:
            return actions
        actions = as_action(actions, None)
        expected = (*leading, *(self.action_space.shape or ()))
        if actions.shape != expected:
            raise InvalidActionError(
                f"Expected flat actions of shape {expected}, got {actions.shape}."
            )
        return actions.reshape(*leading, *(self._action_shape or ()))

    def infos(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Return infos, of one or of many environments, without texts if none are wanted."""
        if self.string_infos:
            return infos
        kept: dict[str, Any] = {}
        for key, value in infos.items():
            if isinstance(value, dict):
                kept[key] = self.infos(value)
            elif not _has_text(value):
                kept[key] = value
        gone = infos.keys() - kept
        return {key: value for key, value in kept.items() if key[1:] not in gone}  # their masks


class PlainSpaces(gym.Wrapper[Any, np.ndarray, dict[str, Any], np.ndarray]):
    """Give an environment spaces and infos that every RL library takes.

    With ``flat``, the observation is one float32 vector, the action too::

        observation   {rl_token (D,), vla_action (C, 7), task_id}  ->  (D + 7 C + tasks,)
        action        (C, 7)                                       <-  (7 C,), row after row

    An integer like ``task_id`` becomes as many numbers as it has values, a 1 among zeros; images
    become numbers from 0 to 255. ``observation`` of :attr:`form` does the same to any observation.
    It may be one of ``LiberoVectorEnv``'s ``env_wrappers``;
    :class:`vla_gym.wrappers.vector.PlainSpaces` does the same for many environments in the
    trainer's process, ``final_obs`` included.

    Attributes:
        form: What converts.
    """

    def __init__(
        self,
        env: gym.Env[dict[str, Any], np.ndarray],
        flat: bool = True,
        obs_keys: Sequence[str] | None = None,
        string_infos: bool = True,
    ) -> None:
        """Wrap an environment with a Dict observation.

        Args:
            env: For example ``LiberoVLA-*``.
            flat: Whether observation and action are vectors; needs a Box action.
            obs_keys: The entries of the observation that are kept, in this order; None for all, in
                the order of the observation space. Without ``flat`` the observation is a Dict.
            string_infos: Whether infos may hold texts such as ``instruction``.

        Raises:
            ConfigError: If the observation is no Dict, an entry does not exist, is named twice or
                cannot be made a vector, or the action is no Box.
        """
        super().__init__(env)
        self.form = PlainForm(env.observation_space, env.action_space, flat, obs_keys, string_infos)
        self.observation_space = self.form.observation_space
        self.action_space = self.form.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self.form.observation(obs), self.form.infos(info)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action.

        Raises:
            InvalidActionError: Wrong shape.
        """
        obs, reward, terminated, truncated, info = self.env.step(self.form.actions(action))
        obs, info = self.form.observation(obs), self.form.infos(info)
        return obs, float(reward), terminated, truncated, info

    def get_state(self) -> Any:
        """Return the wrapped environment's state."""
        return self.env.get_wrapper_attr("get_state")()

    def set_state(self, state: Any) -> Any:
        """Go on from a state of the wrapped environment; return the observation of that moment."""
        return self.form.observation(self.env.get_wrapper_attr("set_state")(state))


def _parse_keys(obs_keys: Sequence[str] | None, found: spaces.Dict) -> tuple[str, ...]:
    names = ", ".join(found)
    if obs_keys is None:
        return tuple(found)
    if isinstance(obs_keys, str) or not isinstance(obs_keys, Sequence) or not obs_keys:
        raise ConfigError(f"obs_keys must be a sequence of some of {names}; got {obs_keys!r:.80}.")
    unknown = [key for key in obs_keys if not isinstance(key, str) or key not in found.spaces]
    if unknown:
        raise ConfigError(f"Unknown obs_keys {unknown!r:.200}: the observation has {names}.")
    if len(set(obs_keys)) != len(obs_keys):
        raise ConfigError(f"obs_keys must be different, got {list(obs_keys)}.")
    return tuple(obs_keys)


def _as_vector(space: gym.Space[Any]) -> spaces.Box:
    flat: Any = spaces.flatten_space(space)
    low, high = flat.low.astype(np.float32), flat.high.astype(np.float32)
    return spaces.Box(low, high, dtype=np.float32)


def _has_text(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.dtype == object:
        return any(isinstance(entry, str) for entry in value.flat)
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype.kind == "U")
