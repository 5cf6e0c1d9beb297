"""Evaluation at the end of training, result cards and the td3 command, on the toy task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resume_target import make_toy_player, use_toy

import vla_gym_trainers
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rollout import Start
from vla_gym_trainers.cli import main
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.evaluation.policy_config import _numbered
from vla_gym_trainers.evaluation.summary import summarize
from vla_gym_trainers.evaluation.trained import TrainedOn, load_policy, trained_on, trained_vla
from vla_gym_trainers.runs.result_card import make_card, software_versions, write_json
from vla_gym_trainers.td3.train import TD3RunConfig

SMALL: dict[str, Any] = {
    "total_timesteps": 120,
    "learning_starts": 40,
    "critic_warmup_steps": 10,
    "batch_size": 16,
    "utd_ratio": 1.0,
    "net_arch": (16,),
    "checkpoint_every": 50,
    "eval_states": 6,
    "progress": False,
}


def test_lazy_exports() -> None:
    for name in vla_gym_trainers.__all__:
        assert getattr(vla_gym_trainers, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        vla_gym_trainers.__getattr__("nonsense")


def starts(states: Sequence[int], task_id: int = 0) -> list[Start]:
    return [Start("goal", task_id, state) for state in states]


class Corrects:
    """Knows what the reference's mistake is."""

    def predict(
        self, observation: Any, state: None = None, *, deterministic: bool
    ) -> tuple[np.ndarray, None]:
        assert deterministic and state is None
        action = observation["vla_action"].copy()
        action[..., :3] -= [0.3, -0.24, 0.18]
        return action, None


def test_the_vla_and_a_policy_play_the_same_states() -> None:
    with closing(make_toy_player()) as player:
        results = player.evaluate(Corrects(), starts(range(40)))
        again = player.evaluate(None, starts(range(40)))
    first, policy = results["start"], results["policy"]
    assert again["policy"]["episodes"] == first["episodes"]
    assert 0 < first["total"]["num_successes"] < policy["total"]["num_successes"]
    assert policy["paired"]["total"]["wins"] > policy["paired"]["total"]["losses"]
    assert [row["init_state_id"] for row in policy["episodes"]] == list(range(40))


def test_the_command_leaves_everything(tmp_path, monkeypatch, capsys):
    use_toy(monkeypatch)
    preset, run_dir = tmp_path / "small.yaml", tmp_path / "run"
    preset.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in SMALL.items()))
    arguments = ["--preset", str(preset), "--run-dir", str(run_dir), "--task-ids", "8"]
    assert main(["td3", *arguments]) == 0
    output = capsys.readouterr().out
    assert "goal 8" in output and "run directory" in output
    names = {path.name for path in run_dir.iterdir()}
    files = {"config.json", "card.json", "policy.safetensors", "last.safetensors", "metrics.jsonl"}
    assert files | {"checkpoints", "tensorboard"} <= names
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["000000104", "000000120"]  # at 56, 104 and the end; the newest two
    card = json.loads((run_dir / "card.json").read_text())
    assert card["config"]["total_timesteps"] == 120
    assert card["versions"]["mujoco"]
    assert card["versions"]["libero"]
    training = card["results"]["training"]
    assert training["chunks"] == 120
    assert training["warmup_episodes"] > 0
    evaluation = card["results"]["evaluation"]
    low, high = evaluation["start"]["total"]["wilson_95"]
    assert 0 <= low < high <= 1
    assert len(evaluation["policy"]["episodes"]) == 6

    # The saved policy, loaded again from disk, plays the same episodes.
    with closing(make_toy_player()) as player:
        again = summarize(player.play(load_policy(run_dir), starts(range(6), 8)))
    assert again["episodes"] == evaluation["policy"]["episodes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_starts": 500, "total_timesteps": 400}, "learning_starts"),
        ({"eval_states": 51}, "eval_states"),
    ],
)
def test_config_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TD3RunConfig(**changes)


def test_a_folder_without_a_policy_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No trained policy.*ends with .* --max-minutes 0"):
        load_policy(tmp_path)


def test_cards_are_atomic_plain_json(tmp_path: Path) -> None:
    card = make_card(
        "x",
        config=EvalConfig(),
        seeds={"run": 1},
        environment={"gl_renderer": None},
        results={"rate": np.float32(0.5), "states": (np.int64(1), 2)},
    )
    write_json(tmp_path / "a" / "card.json", card)
    loaded = json.loads((tmp_path / "a" / "card.json").read_text())
    assert loaded["results"] == {"rate": 0.5, "states": [1, 2]}
    assert loaded["versions"] == software_versions()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["card.json"]
    with pytest.raises(ConfigError, match="JSON"):
        write_json(tmp_path / "b.json", {"x": float("nan")})


def test_a_run_names_its_vla_and_rl_token(tmp_path: Path) -> None:
    assert trained_on(tmp_path) == TrainedOn("mini", "auto", "tokens")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vla": "mini-few", "rl_token": "/token"}))
    for path in (tmp_path, tmp_path / "best.safetensors"):
        assert trained_on(path) == TrainedOn("mini-few", "/token", "tokens")
    config.write_text(json.dumps({"vla": "mini-few"}))  # a run from before there was a choice
    assert trained_on(tmp_path) == TrainedOn("mini-few", "auto", "tokens")
    config.write_text("{")  # not silently another VLA
    with pytest.raises(ConfigError, match="config.json.*Restore it"):
        trained_on(tmp_path)


@pytest.mark.parametrize("told", [True, False])
def test_a_policy_that_is_told_the_task_keeps_to_its_suite(tmp_path: Path, told: bool) -> None:
    config = {"vla": "mini-few", "suite": "libero_goal", "use_task_id": told}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for suite in ("goal", "goal-swap"):
        EvalConfig(policy=str(tmp_path), suite=(suite,)).check()
    (tmp_path / "policy.safetensors").touch()
    elsewhere = EvalConfig(policy=str(tmp_path / "policy.safetensors"), suite=("goal", "spatial"))
    if not told:
        elsewhere.check()
        return
    with pytest.raises(ConfigError, match="which task of goal it plays.*cannot play spatial: choo"):
        elsewhere.check()
    nothing_there = EvalConfig(policy=str(tmp_path / "expret"), suite=("spatial",))
    nothing_there.check()  # that it is missing is said when it is loaded
    for trained, played, fits in (
        ("goal+spatial", "goal-swap+spatial", True),
        ("libero_goal_swap", "goal", True),
        ("goal+spatial", "goal", False),
        ("bddl-1", "bddl-2", False),
    ):
        assert (_numbered(trained) == _numbered(played)) is fits


def test_the_vla_that_was_trained(tmp_path: Path) -> None:
    assert trained_vla(tmp_path, "mini") is None
    (tmp_path / "adapters").mkdir()
    assert trained_vla(tmp_path, "oft:/path") == f"oft:/path?adapters={tmp_path}/adapters"
    assert trained_vla(tmp_path, "oft:/path?a=1") == f"oft:/path?a=1&adapters={tmp_path}/adapters"
    assert trained_vla(tmp_path, "oft:/path?adapters=/other") is None
    (tmp_path / "vla").mkdir()
    assert trained_vla(tmp_path, "mini") == f"{tmp_path}/vla"
    for mark in "?&":  # a path that no specification can hold
        run = tmp_path / f"what{mark}"
        (run / "adapters").mkdir(parents=True)
        assert trained_vla(run, "mini") is None
