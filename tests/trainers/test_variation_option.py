"""``--variation`` reaches the training environments of every trainer; evaluations keep the look."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_gym.cli import main as cli
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError
from vla_gym.vla import load
from vla_gym_trainers.cli import main
from vla_gym_trainers.evaluation.cards import read_card
from vla_gym_trainers.evaluation.command import run_eval
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.on_policy.config import GRPOConfig
from vla_gym_trainers.on_policy.networks import libero_envs
from vla_gym_trainers.rl_token.collect_states import states_of_episodes
from vla_gym_trainers.rl_token.vla_states import StatesConfig
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.td3.train import train_td3

Looks = list[tuple[LiberoEnv, np.ndarray | None]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Of each episode its environment and ``info["variation"]``."""
    seen: Looks = []
    plain = LiberoEnv.reset

    def reset(self: LiberoEnv, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = plain(self, seed=seed, options=options)
        seen.append((self, info.get("variation")))
        return obs, info

    monkeypatch.setattr(LiberoEnv, "reset", reset)
    return seen


def test_td3_trains_on_varied_scenes(tmp_path: Path, looks: Looks, monkeypatch: Any) -> None:
    """Two environments are trained on looks of their own, drawn fast; the other has LIBERO's."""
    monkeypatch.setattr("vla_gym_trainers.td3.train.EVAL_ENVS", 1)
    config = TD3RunConfig(
        **{"total_timesteps": 16, "learning_starts": 8, "batch_size": 8, "eval_states": 0},
        **{"num_envs": 2, "workers": 0, "run_dir": tmp_path, "progress": False},
        task_ids=(7,),
        critic_warmup_steps=2,
        net_arch=(16,),
        variation="mild",
        scene_reset_interval=3,
        visual_profile="fast",
    )
    card = train_td3(config).card
    varied = [(env, look.tobytes()) for env, look in looks if look is not None]
    training, evaluating = {env for env, _ in varied}, {env for env, look in looks if look is None}
    assert len(training) == 2 <= len({look for _, look in varied})
    assert len(evaluating) == 1 and not evaluating & training
    for env, look in looks:
        assert env.visual_profile == (None if look is None else "fast")
    assert card["environment"]["variation"] == card["config"]["variation"] == "mild"
    assert card["environment"]["scene_reset_interval"] == 3
    with pytest.raises(ConfigError, match="variation='mild', not None"):
        train_td3(dataclasses.replace(config, variation=None, resume=tmp_path))


def test_environments_of_the_on_policy_trainers() -> None:
    config = GRPOConfig(num_envs=4, group_size=2, eval_envs=1, workers=0, variation="strong")
    networks: Any = SimpleNamespace(chunk_len=8, policy=SimpleNamespace(image_size=16))
    envs = libero_envs(config, networks)
    with closing(envs.train()) as training, closing(envs.evaluation()) as evaluation:
        rows = training.reset(seed=0)[1]["variation"]
        assert (rows[::2] == rows[1::2]).all() and (rows[1] != rows[2]).any()  # a group's one look
        assert "variation" not in evaluation.reset(seed=0)[1]


def test_states_of_the_rl_token(looks: Looks) -> None:
    config = StatesConfig(
        **{"suites": ("goal",), "task_ids": (9,), "expert_episodes": 2, "rollout_episodes": 0},
        variation="mild",
    )
    states_of_episodes(load("mini"), config)
    assert len({row.tobytes() for _, row in looks if row is not None}) == 2


EVAL = EvalConfig(policy="random", task_ids=(8,), episodes=4, workers=0, progress=False)


def test_eval_plays_looks_and_says_so(tmp_path: Path, looks: Looks) -> None:
    config = dataclasses.replace(
        EVAL, variation="mild", scene_reset_interval=2, chunk_len=300, out=tmp_path
    )
    card = run_eval(config)
    # States 0 and 1 share one, 2 and 3.
    assert len({row.tobytes() for _, row in looks if row is not None}) == 2
    assert [row.get("seed", 0) for row in card["results"]["episodes"]] == [0, 0, 1, 1]
    assert card["protocol"]["variation"] == card["environment"]["variation"] == "mild"
    assert [episode.start for episode in read_card(tmp_path).episodes] == list(config.starts())
    assert run_eval(dataclasses.replace(config, resume=True))["results"] == card["results"]
    with pytest.raises(ConfigError, match="variation is None here, mild in"):
        run_eval(dataclasses.replace(EVAL, paired=tmp_path))


@pytest.mark.parametrize("command", ["td3", "eval"])
def test_a_wrong_level_is_one_error(command: str, capsys: Any) -> None:
    call = cli.main if command == "eval" else main
    try:
        status = call([command, "--variation", "wild"])
    except SystemExit as error:  # of tyro
        status = int(str(error.code))
    assert status == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "There is no variation 'wild': expected one of 'none', 'mild', 'strong'" in said


def test_settings_of_earlier_runs_have_no_variation(tmp_path: Path) -> None:
    from vla_gym_trainers.runs.settings import read_settings

    file = tmp_path / "config.json"
    file.write_text(json.dumps({"assets": "lite", "physics": "exact"}))
    config = read_settings(file, TD3RunConfig)
    assert config.env_kwargs() == {
        **{"assets": "lite", "physics": "exact"},
        **{"variation": None, "scene_reset_interval": 1},
    }
