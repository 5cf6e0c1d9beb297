"""Collecting in a thread: bounds, hand-over, clean stop, errors, checkpoints, evaluation beside."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_target import TINY, make_toy_env, make_toy_vec
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv
from toy_env import ToyReach

import vla_gym_trainers.td3.train as train_td3_module
from vla_gym.errors import ConfigError
from vla_gym_trainers import TD3BC
from vla_gym_trainers.runs.closed_loop import BestModel
from vla_gym_trainers.runs.metrics import read_metrics
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.train import TD3Config, resume_td3, train_td3


@pytest.fixture(autouse=True)
def clean() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not [t for t in threading.enumerate() if t.name == "td3bc-collector"]


def make(env: Any = None, **changes: Any) -> TD3BC:
    settings: dict[str, Any] = {
        "learning_starts": 32,
        "critic_warmup_steps": 5,
        "batch_size": 16,
        "utd_ratio": 0.5,
        "train_freq": 2,
        "max_ahead": 12,
        "policy_kwargs": {"net_arch": (16,), "precision": "fp32"},
        "seed": 3,
    }
    return TD3BC(
        "RLTokenPolicy",
        env or DummyVecEnv([ToyReach, ToyReach]),
        asynchronous=True,
        **{**settings, **changes},
    )


class Watch(BaseCallback):
    """Keeps what the loop knows; sleeps between blocks; stops after so many steps."""

    def __init__(self, pause: float = 0.0, stop_after: int = 10**9) -> None:
        super().__init__()
        self.pause, self.stop_after = pause, stop_after
        self.loop: Any = None
        self.versions: list[int] = []

    def _on_rollout_start(self) -> None:
        self.loop = self.model.loop  # type: ignore[attr-defined]
        time.sleep(self.pause)

    def _on_step(self) -> bool:
        self.versions.append(self.locals["version"])
        return self.n_calls < self.stop_after


def test_collects_ahead_within_bounds_and_learns_what_it_is_worth() -> None:
    model, watch = make(), Watch(pause=0.01)
    model.learn(160, callback=watch, log_interval=1)
    assert model.num_timesteps == model.replay_buffer.num_added == 160
    # 0.5 critic steps a chunk after the warm-up, up to a block of 2 x 2 chunks around its end
    assert (160 - 32 - 4) / 2 <= model._n_updates <= (160 - 32 + 4) / 2
    loop = watch.loop
    assert 4 < loop.max_ahead_seen <= 12
    assert 0 < loop.max_staleness <= loop.staleness_bound == np.ceil(0.5 * (12 + 4)) + 1
    assert watch.versions == sorted(watch.versions)
    assert len(set(watch.versions)) > 5  # weights are handed over again and again
    assert model.acting.version == model._n_updates
    assert model.loop is None
    finished = np.isfinite(model.replay_buffer.mc_returns[:160])
    assert finished.sum() > 100  # episodes' transitions are stored in their order
    model.learn(16, reset_num_timesteps=False)
    assert model.num_timesteps == 176


def test_acts_with_the_weights_that_were_handed_over() -> None:
    model = make()
    obs = {key: np.asarray(value)[None] for key, value in ToyReach().reset(seed=0)[0].items()}
    np.testing.assert_array_equal(model.acting.act(obs), obs["vla_action"])
    with torch.no_grad():
        model.policy.actor.head.bias.fill_(0.3)
    np.testing.assert_array_equal(model.acting.act(obs), obs["vla_action"])
    model.hand_over()
    np.testing.assert_allclose(model.acting.act(obs), model.predict(obs)[0], atol=1e-6)


def test_a_callback_stops_it_and_nothing_is_lost() -> None:
    model, watch = make(), Watch(stop_after=30)
    model.learn(100_000, callback=watch)
    collected = watch.loop.collector.collected
    assert 60 <= collected <= 60 + 12 + 4
    assert model.num_timesteps == model.replay_buffer.num_added == collected


def test_errors_of_the_environment_surface() -> None:
    class Breaks(ToyReach):
        steps = 0

        def step(self, action: np.ndarray) -> Any:
            self.steps += 1
            if self.steps > 20:
                raise RuntimeError("the simulator broke")
            return super().step(action)

    model = make(DummyVecEnv([Breaks]))
    with pytest.raises(RuntimeError, match="simulator broke"):
        model.learn(200)
    assert model.replay_buffer.num_added == 20


def test_errors_of_the_learner_stop_the_collector() -> None:
    model = make()

    def broken(gradient_steps: int, batch_size: int) -> None:
        raise RuntimeError(f"no {gradient_steps} steps of {batch_size}")

    model.train = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="steps of 16"):
        model.learn(200)
    assert model.loop is None


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="exclude"):
        make(pipelined=True)
    with pytest.raises(ConfigError, match="max_ahead"):
        make(max_ahead=1).learn(10)
    with pytest.raises(ConfigError, match="exclude"):
        TD3Config(asynchronous=True)


def test_evaluation_goes_on_beside_collecting(tmp_path: Path) -> None:
    run, release, seeds = RunDir(tmp_path), threading.Event(), []

    class Held(DummyVecEnv):
        def reset(self) -> Any:
            seeds.append(self._seeds[0])
            assert release.wait(60)
            return super().reset()

    best = BestModel(Held([ToyReach]), run, 20, 2, seed=5, background=True)

    class Evaluate(BaseCallback):
        def _on_rollout_start(self) -> None:
            if best.is_due(self.model.num_timesteps):
                best.begin(self.model, self.model.num_timesteps)  # type: ignore[arg-type]
            assert best.poll() == {}

        def _on_step(self) -> bool:
            return True

    model = make()
    model.learn(80, callback=Evaluate())
    assert model.num_timesteps == 80  # the evaluation begun at chunk 20 is still held
    assert not run.best.exists()
    release.set()
    metrics = best.poll(wait=True)
    assert 20 <= metrics["eval/chunks"] < 30  # of the policy as it was then
    assert run.best.is_file()
    assert seeds == [5, 5]  # the VLA and the policy on the same layouts
    assert best.is_due(80)
    best.close()


def test_a_run_with_checkpoints_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_td3_module, "make_vec", make_toy_vec)
    monkeypatch.setattr(train_td3_module, "make_env", make_toy_env)
    settings = {**TINY, "asynchronous": True, "pipelined": False, "eval_states": 0}
    train_td3(TD3Config(run_dir=tmp_path, **{**settings, "total_chunks": 150}))
    run = RunDir(tmp_path)
    for folder in run.checkpoints():
        state = json.loads((folder / "state.json").read_text())
        assert state["chunks"] == state["transitions"] == int(folder.name)
    config = TD3Config(run_dir=tmp_path, **settings)
    training = resume_td3(tmp_path, config).card["results"]["training"]
    assert training["chunks"] == 240
    assert len(training["closed_loop"]["history"]) >= 2
    rows = read_metrics(run.metrics)
    assert any("async/staleness" in row for row in rows)
    assert any("eval/success" in row for row in rows)
