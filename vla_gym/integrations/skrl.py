"""Skrl learns from the ends of episodes as they were.

skrl takes what a vector environment's ``step`` returns for the next observation, also where an
episode has ended: that is the first observation of another one (SAME_STEP), or the reset counts as
a step (NEXT_STEP). Final observations stay unread in the infos.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from skrl.envs.wrappers.torch import wrap_env as skrl_wrap_env

from vla_gym.errors import ConfigError


def wrap_env(envs: gym.vector.VectorEnv[Any, Any, Any]) -> Any:
    """Wrap a vector environment for skrl, as its ``wrap_env``; see also :func:`use_final_obs`.

    Raises:
        ConfigError: If its autoreset mode is not SAME_STEP, or its observation is not flat.
    """
    mode = envs.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.SAME_STEP:
        raise ConfigError(
            f"Expected environments that reset in the same step, got {mode}: make them with "
            "autoreset_mode='SAME_STEP'."
        )
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        raise ConfigError(
            f"Expected a flat observation, got {envs.single_observation_space}: make the "
            "environments with flat=True."
        )
    return skrl_wrap_env(envs, wrapper="gymnasium", verbose=False)


def use_final_obs(agent: Any) -> Any:
    """Have an agent of skrl store final observations as the next ones where episodes end.

    Args:
        agent: Any agent of ``skrl.agents.torch``, trained on what :func:`wrap_env` returned, on
            all of its environments: a trainer's ``scopes`` give an agent a part of the
            observations, and all final ones.

    Returns:
        The same agent, whose ``record_transition`` raises ConfigError for a part.
    """
    record = agent.record_transition

    @functools.wraps(record)
    def record_transition(*, next_observations: torch.Tensor, infos: Any, **kwargs: Any) -> None:
        if "final_obs" in infos:
            if len(next_observations) != len(infos["_final_obs"]):
                raise ConfigError(
                    f"Expected the transitions of all {len(infos['_final_obs'])} environments, got "
                    f"{len(next_observations)}: train one agent, without scopes."
                )
            rows = np.flatnonzero(infos["_final_obs"])
            final = np.stack([infos["final_obs"][row] for row in rows])
            # A copy: the trainer acts on the others next.
            next_observations = next_observations.clone()
            next_observations[rows] = torch.as_tensor(final).to(next_observations)
        record(next_observations=next_observations, infos=infos, **kwargs)

    agent.record_transition = record_transition
    return agent
