"""Tasks of a trainer: there is one at least, each is there once, and exists."""

import dataclasses
from typing import Any

import pytest

from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.rl_token.vla_states import StatesConfig
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.world_model.config import WorldModelConfig


def checked(config: Any) -> Any:
    if hasattr(config, "check"):  # the others are checked when they are made
        config.check()
    return config


@pytest.mark.parametrize("kind", [TD3RunConfig, PPOConfig, GRPOConfig, WorldModelConfig])
def test_mistakes_in_tasks_are_one_clear_error(kind: Any) -> None:
    for task_ids in ((), (8, 8)):
        with pytest.raises(ConfigError, match="task_ids needs at least one value, each once; got"):
            checked(kind(task_ids=task_ids))
    with pytest.raises(UnknownTaskError, match="99"):
        checked(kind(task_ids=(8, 99)))


def test_suites_under_two_names_are_named_twice() -> None:
    config = StatesConfig(suites=("goal", "libero_goal"))
    with pytest.raises(ConfigError, match="each once"):
        checked(config)
    only = dataclasses.replace(config, suites=("goal",), task_ids=(8, 7))
    assert [task.key for task in checked(only).tasks()] == ["goal_8", "goal_7"]
    assert PPOConfig(suite="goal").tasks() == tuple(range(10))
