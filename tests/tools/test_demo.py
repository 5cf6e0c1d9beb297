"""``make demo``: what it refuses before it plays anything."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from vla_gym.errors import ConfigError

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_a_preset_of_several_tasks_needs_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", demo)  # its dataclass looks itself up
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # it would set them for good
        monkeypatch.setenv(name, "1")
    spec.loader.exec_module(demo)
    several = demo.DemoConfig(preset="td3_suite")
    with pytest.raises(ConfigError, match="td3_suite trains on several tasks.*give --task-id"):
        demo.training_settings(several, tmp_path)
    one = demo.DemoConfig(preset="td3_suite", task_id=3)
    assert demo.training_settings(one, tmp_path).task_ids == (3,)
