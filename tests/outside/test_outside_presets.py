"""Presets and settings of runs from elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from spoilt_files import refused

from vla_gym.errors import ConfigError
from vla_gym_trainers import cli
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.runs.settings import (
    command_of,
    load_preset,
    preset_names,
    presets_of,
    read_settings,
)

PRESETS = [
    ("batch_size: abc", "batch_size: expected `int`, got 'abc'"),
    ("learning_rate: .nan", "not finite"),
    ("run_dir: 5", "run_dir: expected a path"),
    ("null", "expected `object`"),
    ("a: [", "is not valid YAML"),
    ("nonsense: 1", "unknown keys ['nonsense']"),
]


@pytest.mark.parametrize(("text", "expected"), PRESETS, ids=[text[:30] for text, _ in PRESETS])
def test_a_bad_preset_is_one_clear_error(
    text: str, expected: str, tmp_path: Path, one_error: Any
) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(text)
    error = one_error(cli.main, "td3", "--preset", str(preset), "--run-dir", str(tmp_path / "run"))
    assert len(error) < 3000 and "mine.yaml" in error and expected in error, error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"gamma": "a"}', "gamma: expected `float`, got 'a'"),
        ("[]", "expected `object`, got array"),
    ],
)
def test_a_bad_configuration_of_a_run_is_one_clear_error(
    text: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    file = tmp_path / "config.json"
    refused(lambda: read_settings(file, PPOConfig), file, expected, kind=ConfigError)


def test_shipped_presets_are_read_and_written_settings_come_back(tmp_path: Path) -> None:
    from vla_gym_trainers.runs.result_card import to_plain

    kinds = [cli._load(settings) for _, settings, _ in cli.COMMANDS.values()]
    named = [(kind, name) for kind in kinds for name in presets_of(kind)]
    assert sorted(name for _, name in named) == preset_names()
    for kind, name in named:
        config: Any = load_preset(kind, name)
        if hasattr(config, "check"):  # the others are checked when they are made
            config.check()
        config.run_dir = tmp_path
        (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
        assert read_settings(tmp_path / "config.json", kind) == config
        assert name == "rl_token" or command_of(to_plain(config)) == kind.algorithm
