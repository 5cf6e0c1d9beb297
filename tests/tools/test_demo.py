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
    one = demo.DemoConfig(preset="td3_suite", task_id=3)
    assert demo.training_settings(one, tmp_path).task_ids == (3,)
