"""The three phases one after the other on LIBERO's lite pack, as a user runs them."""

import json

import numpy as np
import pytest
from td3_toys import SMALL

from vla_gym_trainers.cli import main
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.runs.run_dir import RunDir

TEACHER = (
    *("--task-ids", "8", "--random-episodes", "2", "--vla-episodes", "1", "--expert-episodes", "1"),
    *("--tokenizer-steps", "60", "--steps", "60", "--checkpoint-every", "60", "--film-every", "0"),
)
SHORT = ("--task-ids", "8", "--num-envs", "2", "--film-every", "2", "--eval-envs", "2")


def run(*arguments):
    assert main([*arguments, "--no-progress"]) == 0


@pytest.mark.slow
def test_three_phases_end_to_end(tmp_path, capsys):
    teacher, explorer, last = (tmp_path / name for name in ("teacher", "explorer", "adversarial"))
    run("world-model", "--preset", "f1_tiny", "--run-dir", str(teacher), *TEACHER)
    preset = ("explorer", "--preset", "f1_tiny_explorer", "--run-dir", str(explorer))
    run(*preset, "--teacher", str(teacher), "--total-steps", "600", *SHORT)
    assert "explorer" in capsys.readouterr().out
    found = json.loads((explorer / "card.json").read_text())["results"]["behaviours"]
    assert set(found) == {"random", "vla", "explorer"}
    assert len({row["steps"] for row in found.values()}) == 1
    assert all(row["coverage"] > 0.0 and row["prediction_error"] > 0.0 for row in found.values())
    assert {p.suffix for p in (explorer / "videos").iterdir()} == {".mp4", ".png"}

    preset = ("adversarial", "--preset", "f1_tiny_adversarial", "--run-dir", str(last))
    run(*preset, "--explorer", str(explorer), "--total-iterations", "2", *SHORT)
    results = json.loads((last / "card.json").read_text())["results"]
    before, after = results["behaviours_before"], results["behaviours"]
    # The world model learns from the explorer's data, and is reminded of the VLA's.
    assert after["explorer"]["prediction_error"] < before["explorer"]["prediction_error"]
    assert after["explorer"]["coverage"] == before["explorer"]["coverage"]
    assert len(RunDir(last).checkpoints()) and (last / "model" / "model.safetensors").is_file()

    from vla_gym_trainers.td3.config import TD3RunConfig
    from vla_gym_trainers.td3.train import train_td3

    card = EvalConfig(policy=str(explorer), suite=("goal",), task_ids=(8,), episodes=1)
    assert card.make_policy().chunk_len == 4
    config = TD3RunConfig(
        task_ids=(8,),
        assets="lite",
        chunk_len=4,
        num_envs=2,
        workers=1,
        **SMALL,
        total_timesteps=32,
        eval_states=0,
        explore_with=last,
        explore_share=0.5,
        run_dir=tmp_path / "td3",
        progress=False,
    )
    counts = train_td3(config).card["results"]["training"]
    assert np.isfinite([v for v in counts.values() if isinstance(v, int | float)]).all()
