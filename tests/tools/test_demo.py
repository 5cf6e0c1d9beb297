"""``make demo``: what it refuses before it plays anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import demo
from vla_gym.errors import ConfigError


def test_a_preset_of_several_tasks_needs_one_named(tmp_path: Path) -> None:
    several = demo.DemoConfig(preset="td3_suite")
    with pytest.raises(ConfigError, match="td3_suite trains on several tasks.*give --task-id"):
        demo.training_settings(several, tmp_path)
    one = demo.DemoConfig(preset="td3_suite", task_id=3, eval_states=20)
    assert demo.training_settings(one, tmp_path).task_ids == (3,)


def test_a_preset_that_evaluates_nothing_needs_states(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compares on official states: give --eval-states"):
        demo.training_settings(demo.DemoConfig(preset="td3_single"), tmp_path)
