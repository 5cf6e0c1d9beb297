"""Collecting ahead of learning: bounds, clean stop, errors, checkpoints, evaluation beside."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resume_target import TINY, make_toy_player, use_toy
from stable_baselines3.common.vec_env import DummyVecEnv
from td3_toys import td3_bc
from toy_env import ToyReach

from vla_gym.errors import ConfigError
from vla_gym.rollout.episodes import sampled_starts
from vla_gym_trainers import TD3BC
from vla_gym_trainers.report.data import read_rows
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.closed_loop import BestModel
from vla_gym_trainers.td3.train import TD3RunConfig, train_td3


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    assert not [t for t in threading.enumerate() if t.name == "collector"]


def make(**changes: Any) -> TD3BC:
    settings = {"learning_starts": 32, "utd_ratio": 0.5, "train_freq": 2, "ahead": 3, **changes}
    return td3_bc(DummyVecEnv([ToyReach, ToyReach]), seed=3, **settings)


def test_collects_ahead_within_bounds_and_learns_what_it_is_worth() -> None:
    model = make()
    model.learn(160, log_interval=1)
    assert model.num_timesteps == model.replay_buffer.num_added == 160
    # 0.5 critic steps a chunk after the warm-up, up to a block of 2 x 2 chunks around its end
    assert (160 - 32 - 4) / 2 <= model._n_updates <= (160 - 32 + 4) / 2
    assert 0 < model.max_staleness <= 3  # the newest weights are taken again and again
    assert model.pipeline is None
    finished = np.isfinite(model.replay_buffer.mc_returns[:160])
    assert finished.sum() > 100  # episodes' transitions are stored in their order
    model.learn(16, reset_num_timesteps=False)
    assert model.num_timesteps == 176


def test_a_callback_stops_it_and_what_was_collected_comes_first() -> None:
    model = make()
    model.learn(100_000, callback=lambda *_: model.num_timesteps < 60)
    assert model.num_timesteps == model.replay_buffer.num_added == 60
    waiting = len(model.pipeline_state["ready"])
    assert waiting <= 3
    model.learn(4 * waiting + 8, reset_num_timesteps=False)
    assert model.num_timesteps == model.replay_buffer.num_added == 68 + 4 * waiting


def test_errors_of_the_learner_stop_collecting() -> None:
    """Those of the collector come to the learner by the pipeline (test_pipeline.py)."""
    model = make()

    def broken(gradient_steps: int, batch_size: int) -> None:
        raise RuntimeError(f"no {gradient_steps} steps of {batch_size}")

    model.train = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="steps of 16"):
        model.learn(200)
    assert model.pipeline is None


def test_other_environments_of_sb3_have_no_groups() -> None:
    with pytest.raises(ConfigError, match="groups"):
        make(groups=2).learn(10)


def test_evaluation_goes_on_beside_collecting(tmp_path: Path) -> None:
    run, release, seeds = RunDir(tmp_path), threading.Event(), []

    starts = sampled_starts("toy", (0,), 4, 5)
    player = make_toy_player()
    play = player.play

    def held(model: Any, some: Any) -> Any:
        seeds.append([start.seed for start in some])
        assert release.wait(60)
        return play(model, some)

    player.play = held  # type: ignore[method-assign]
    best = BestModel(player, starts, run, 20, background=True)

    def evaluate(*_: Any) -> bool:
        if best.is_due(model.num_timesteps):
            best.begin(model, model.num_timesteps)
        return best.poll() == {}

    model = make()
    model.learn(80, callback=evaluate)
    assert model.num_timesteps == 80  # the evaluation begun at chunk 20 is still held
    assert not run.best.exists()
    release.set()
    metrics = best.poll(wait=True)
    assert 20 <= metrics["eval/chunks"] < 30  # of the policy as it was then
    assert run.best.is_file()
    assert seeds == [[5, 6, 7, 8]] * 2  # the VLA and the policy on the same layouts
    assert best.is_due(80)
    best.close()


def test_a_run_with_checkpoints_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations go on beside it; the last one is of its last policy."""
    use_toy(monkeypatch)
    settings = {**TINY, "ahead": 3, "eval_states": 0, "eval_every": 80}
    train_td3(TD3RunConfig(run_dir=tmp_path, **{**settings, "total_timesteps": 150}))
    run = RunDir(tmp_path)
    for folder in run.checkpoints():
        state = json.loads((folder / "state.json").read_text())["trainer"]
        assert state["chunks"] == state["transitions"] == int(folder.name)
    config = TD3RunConfig(resume=tmp_path, **settings)
    training = train_td3(config).card["results"]["training"]
    assert training["chunks"] == 240
    history = training["closed_loop"]["history"]
    assert len(history) >= 2 and history[-1][0] == 240
    rows = read_rows(run.metrics)
    assert any("async/staleness" in row for row in rows)
    assert any("eval/success" in row for row in rows)
