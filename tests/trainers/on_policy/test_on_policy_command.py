"""``vla-gym-train ppo | grpo``: options, presets, resuming; one small run on LIBERO."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from run_logs import rows_of

from vla_gym.errors import WorkerError
from vla_gym.vla.files import resolve_weights
from vla_gym_trainers import cli
from vla_gym_trainers.on_policy import train as module
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.on_policy.train import final_evaluation
from vla_gym_trainers.runs.run import TrainingRun
from vla_gym_trainers.runs.run_dir import RunDir


def test_options_and_presets(monkeypatch, tmp_path, capsys):
    calls, training = [], {"env_steps": 1234, "rollouts": 5, "minutes": 0.5}

    def train(config):
        calls.append(config)
        return TrainingRun(tmp_path, {"results": {"training": training}})

    monkeypatch.setattr(module, "train", train)
    assert cli.main(["grpo", "--preset", "grpo_goal", "--seed", "7", "--task-ids", "1", "2"]) == 0
    config = calls[0]
    assert isinstance(config, GRPOConfig) and config.resume is None
    assert (config.seed, config.task_ids, config.group_size) == (7, (1, 2), 4)
    assert config.groups == 2 and config.max_minutes == 90
    assert "1,234 control steps, 5 rollouts" in capsys.readouterr().out
    assert cli.main(["ppo", "--episodes-per-env", "None", "--gamma", "0.99", "--run-dir", "x"]) == 0
    config = calls[1]
    assert isinstance(config, PPOConfig)
    assert (config.episodes_per_env, config.gamma, str(config.run_dir)) == (None, 0.99, "x")


@pytest.mark.slow
def test_a_run_on_libero(tmp_path, capsys):
    options = {
        "--task-ids": "5",
        "--num-envs": "2",
        "--group-size": "2",
        "--episodes-per-env": "1",
        "--total-steps": "601",  # an episode has 300 control steps at most
        "--learning-rate": "1e-3",
        "--eval-every": "2000",
        "--eval-envs": "1",
        "--eval-layouts": "1",
        "--eval-states": "1",
        "--seed": "1",
    }
    arguments = [word for pair in options.items() for word in pair]
    assert cli.main(["grpo", *arguments, "--run-dir", str(tmp_path), "--no-progress"]) == 0
    assert "run directory" in capsys.readouterr().out
    rows = rows_of(tmp_path)
    assert sum("rollout/success" in row for row in rows) >= 2
    assert [row["eval/gap"] for row in rows if "eval/gap" in row]
    card = json.loads((tmp_path / "card.json").read_text())
    assert {"start", "policy"} <= card["results"]["evaluation"].keys()
    assert "paired" in card["results"]["evaluation"]["policy"]


def test_the_final_evaluation_is_played_where_training_was(tmp_path, monkeypatch):
    asked = []

    def run_eval(config):
        asked.append(config.hosts)
        raise WorkerError

    monkeypatch.setattr("vla_gym_trainers.evaluation.command.run_eval", run_eval)
    shutil.copytree(resolve_weights("mini-few"), tmp_path / "vla")
    config = GRPOConfig(run_dir=tmp_path, vla="mini-few", hosts="ray", eval_states=1)
    with pytest.raises(WorkerError):
        final_evaluation(config, RunDir(tmp_path))
    assert asked == ["ray"]


def test_a_resumed_run_may_be_evaluated_on_more_states(tmp_path: Path) -> None:
    shutil.copytree(resolve_weights("mini-few"), tmp_path / "vla")
    config = GRPOConfig(
        run_dir=tmp_path,
        vla="mini-few",
        assets="lite",
        task_ids=(7,),
        eval_states=1,
        workers=0,
        progress=False,
    )
    for states in (1, 2):
        changed = dataclasses.replace(config, eval_states=states)
        results, world = final_evaluation(changed, RunDir(tmp_path))
        assert results["start"]["total"]["num_episodes"] == states
        assert results["policy"]["paired"]["total"]["losses"] == 0  # the same weights
        assert world["gl_renderer"]
        card = json.loads((tmp_path / "eval_policy" / "card.json").read_text())
        assert card["protocol"]["policy"]["run"] == tmp_path.name
