"""What a run has trained, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.trained_on import TrainedOn, trained_on, trained_vla


def test_a_run_names_its_vla_and_rl_token(tmp_path: Path) -> None:
    assert trained_on(tmp_path) == TrainedOn("mini", "auto")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vla": "mini-few", "rl_token": "/token"}))
    assert (
        trained_on(tmp_path) == trained_on(tmp_path / "best.zip") == TrainedOn("mini-few", "/token")
    )
    config.write_text(json.dumps({"vla": "mini-few"}))  # a run from before there was a choice
    assert trained_on(tmp_path) == TrainedOn("mini-few", "auto")
    for text in ("{", '"vla"', "[1]", ""):  # not silently another VLA
        config.write_text(text)
        with pytest.raises(ConfigError, match="config.json is damaged"):
            trained_on(tmp_path)


def test_the_vla_that_was_trained(tmp_path: Path) -> None:
    assert trained_vla(tmp_path, "mini") is None
    (tmp_path / "adapters").mkdir()
    assert trained_vla(tmp_path, "oft:/path") == f"oft:/path?adapters={tmp_path}/adapters"
    assert trained_vla(tmp_path, "oft:/path?a=1") == f"oft:/path?a=1&adapters={tmp_path}/adapters"
    assert trained_vla(tmp_path, "oft:/path?adapters=/other") is None
    (tmp_path / "vla").mkdir()
    assert trained_vla(tmp_path, "mini") == f"{tmp_path}/vla"


@pytest.mark.parametrize("mark", "?&")
def test_a_path_that_no_specification_can_hold(tmp_path: Path, mark: str) -> None:
    run = tmp_path / f"what{mark}"
    (run / "adapters").mkdir(parents=True)
    assert trained_vla(run, "mini") is None
