"""PlainSpaces for many environments at once, over any vector environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from vla_gym.wrappers.plain_spaces import PlainForm
from vla_gym.wrappers.vector_base import Obs, Step, VectorObservationWrapper, if_env_has


class PlainSpaces(VectorObservationWrapper):
    """Give N environments spaces and infos that every RL library takes.

    Each row is that of :class:`vla_gym.wrappers.PlainSpaces`. Any autoreset mode: in SAME_STEP
    ``infos["final_obs"]`` holds final observations in the same form, (D,) float32 with ``flat``.
    Actions of another shape raise InvalidActionError.

    Attributes:
        form: What converts.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Obs, np.ndarray, np.ndarray],
        flat: bool = True,
        obs_keys: Sequence[str] | None = None,
        string_infos: bool = True,
    ) -> None:
        """Wrap a vector of environments; see :class:`vla_gym.wrappers.PlainSpaces`."""
        super().__init__(env)
        self.form = PlainForm(
            env.single_observation_space, env.single_action_space, flat, obs_keys, string_infos
        )
        self.single_observation_space = self.form.observation_space
        self.single_action_space = self.form.action_space
        self.observation_space = batch_space(self.form.observation_space, env.num_envs)
        self.action_space = batch_space(self.form.action_space, env.num_envs)

    @if_env_has
    def set_state(self, states: Sequence[Any], env_ids: Sequence[int] | None = None) -> Any:
        """Bring environments to states of ``get_state``; return the observations of all."""
        return self.form.observations(self.env.set_state(states, env_ids))

    def _convert_actions(self, actions: Any, env_ids: np.ndarray) -> Any:
        return self.form.actions(actions, len(env_ids))

    def _convert_reset(
        self,
        obs: Obs,
        infos: dict[str, Any],
        env_ids: np.ndarray,  # noqa: ARG002
    ) -> tuple[Any, dict[str, Any]]:
        return self.form.observations(obs), self.form.infos(infos)

    def _convert_step(self, result: Step) -> Step:
        obs, rewards, terminations, truncations, infos = result
        infos = self.form.infos(infos)
        if "final_obs" in infos:
            final_obs = infos["final_obs"].copy()
            for row in np.flatnonzero(infos["_final_obs"]).tolist():
                final_obs[row] = self.form.observation(final_obs[row])
            infos = {**infos, "final_obs": final_obs}
        return self.form.observations(obs), rewards, terminations, truncations, infos
