"""PPO on the RL-token actor, on the toy task."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_target import make_toy_player, make_toy_vec
from stable_baselines3.common.vec_env import DummyVecEnv
from toy_env import ToyReach

import vla_gym_trainers.td3.train as train_td3_module
from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.cli import main
from vla_gym_trainers.evaluation.evaluate import load_policy
from vla_gym_trainers.ppo_actor.algorithm import PPOActor, PPOSettings, gaussian_log_prob
from vla_gym_trainers.ppo_actor.config import PPOActorConfig
from vla_gym_trainers.ppo_actor.rollout import RolloutCollector
from vla_gym_trainers.ppo_actor.train import PPOLoop, resume_ppo_actor, train_ppo_actor
from vla_gym_trainers.runs.metrics import TIME_KEYS, read_metrics
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.stopping import StopRequest

SMALL: dict[str, Any] = {
    "num_envs": 2,
    "total_timesteps": 256,
    "rollout_chunks": 64,
    "value_rollouts": 1,
    "batch_size": 32,
    "epochs": 2,
    "net_arch": (16,),
    "gamma": 0.98,
    "eval_every": 128,
    "eval_layouts": 2,
    "eval_states": 3,
    "checkpoint_every": 128,
    "progress": False,
}


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(train_td3_module, "make_vec", make_toy_vec)
    monkeypatch.setattr(train_td3_module, "make_player", make_toy_player)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def learner_on(env: Any, **changes: Any) -> PPOActor:
    config = PPOActorConfig(**{**SMALL, **changes})
    return PPOLoop(config, RunDir(Path("unused")), env, None, StopRequest()).learner


def test_log_probability_is_that_of_a_normal_distribution() -> None:
    value, mean, log_sigma = torch.randn(5, 2, 7), torch.randn(5, 2, 7), torch.randn(7)
    normal = torch.distributions.Normal(mean, log_sigma.exp().expand_as(mean))
    expected = normal.log_prob(value).sum(dim=(1, 2))
    torch.testing.assert_close(gaussian_log_prob(value, mean, log_sigma), expected)


def test_draws_are_the_vla_plus_smooth_noise() -> None:
    learner = learner_on(DummyVecEnv([ToyReach]), residual_basis=1, sigma=0.1)
    obs = {key: np.asarray(v)[None] for key, v in ToyReach().reset(seed=0)[0].items()}
    obs["vla_action"] = np.zeros((1, 4, 7), np.float32)
    drawn = [learner.draw(obs) for _ in range(300)]
    chunks = np.concatenate([chunk for chunk, _, _ in drawn])
    np.testing.assert_allclose(chunks, np.broadcast_to(chunks[:, :1], chunks.shape), atol=1e-6)
    # sigma 0.1 in units of the action scale: 0.1 for translations, 0.03 for rotations
    np.testing.assert_allclose(chunks[:, 0, :6].std(axis=0), [0.1] * 3 + [0.03] * 3, rtol=0.2)
    correction, log_prob = drawn[0][1:]
    expected = gaussian_log_prob(correction, torch.zeros(1, 1, 7), learner.log_sigma)
    torch.testing.assert_close(log_prob, expected)


class Scripted(ToyReach):
    """Chunks execute 4, 4, 2 steps; episodes end by success and at the limit in turn."""

    episode = -1

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.episode, self.count = self.episode + 1, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> Any:
        super().step(action)
        self.count += 1
        last, wins = self.count == 3, self.episode % 2 == 0
        executed = 2 if last else 4
        info = {"discount": 0.9**executed, "is_success": last and wins}
        reward = 0.9 if last and wins else 0.0
        if last and not wins:
            info["TimeLimit.truncated"] = True
        return self._observe(), reward, last and wins, last and not wins, info


def test_advantages_discount_by_executed_steps_and_bootstrap_at_the_limit() -> None:
    learner = learner_on(DummyVecEnv([Scripted]), num_envs=1, gae_lambda=0.8)
    rollout = RolloutCollector(DummyVecEnv([Scripted]), learner, 0.9).collect(8, lambda *_: None)
    powers = torch.tensor([[4, 4, 2, 4, 4, 2, 4, 4]])
    torch.testing.assert_close(rollout.discounts, 0.9**powers)
    assert rollout.terminated[0].nonzero().flatten().tolist() == [2]
    assert rollout.truncated[0].nonzero().flatten().tolist() == [5]
    made, returns, values = (part[0] for part in learner.advantages(rollout))
    after = learner.values(rollout.next_observations)[0].detach()
    # Inside an episode the observation after a chunk is the one that is acted on next.
    torch.testing.assert_close(after[[0, 1, 3, 4, 6]], values[[1, 2, 4, 5, 7]])
    assert abs(float(after[5] - values[6])) > 1e-6  # but not across the limit
    expected = torch.zeros(8)
    for t in (7, 6, 5, 4, 3, 2, 1, 0):
        discount = 0.9 ** int(powers[0, t])
        bootstrap = 0.0 if t == 2 else discount * after[t]  # success ends, the limit does not
        reward = 0.9 if t == 2 else 0.0
        expected[t] = reward + bootstrap - values[t]
        if t not in (2, 5, 7):
            expected[t] += discount * 0.8 * expected[t + 1]
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(returns, expected + values)


def test_transitions_of_a_dead_worker_and_nan_are_not_learned_from() -> None:
    class Faulty(ToyReach):
        steps = 0

        def step(self, action: np.ndarray) -> Any:
            obs, reward, _, _, info = super().step(action)
            self.steps += 1
            if self.steps == 2:
                obs["proprio"] = np.full(8, np.nan, np.float32)
            info["worker_restarted"] = self.steps == 5
            return obs, reward, False, self.steps == 5, info

    env = DummyVecEnv([Faulty])
    learner = learner_on(env, num_envs=1)
    rollout = RolloutCollector(env, learner, 0.9).collect(7, lambda *_: None)
    # chunk 2 ends in NaN, chunk 3 begins there, chunk 5 was lost
    assert rollout.valid[0].tolist() == [True, False, False, True, False, True, True]
    metrics = learner.update(rollout)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(bool(p.isfinite().all()) for p in learner.learned())


def test_first_step_of_an_update_is_on_policy_and_value_only_leaves_the_actor() -> None:
    env = DummyVecEnv([ToyReach, ToyReach])
    learner = learner_on(env, epochs=1, batch_size=64)
    collector = RolloutCollector(env, learner, 0.98)
    before = learner.policy.actor.body[0].weight.detach().clone()
    head = learner.policy.actor.head.weight
    metrics = learner.update(collector.collect(8, lambda *_: None), value_only=True)
    assert "train/policy_loss" not in metrics
    assert head.detach().abs().max() == 0
    metrics = learner.update(collector.collect(8, lambda *_: None))
    assert metrics["train/minibatches"] == 1
    assert abs(metrics["train/kl"]) < 1e-6  # old and new policy are the same
    assert head.detach().abs().max() > 0
    assert torch.equal(before, learner.policy.actor.body[0].weight)  # no gradient through zeros


def test_learns_beyond_the_reference() -> None:
    env = DummyVecEnv([lambda: ToyReach(gamma=0.98)] * 8)
    env.seed(0)
    learner = learner_on(
        env,
        num_envs=8,
        sigma=0.2,
        learning_rate=2e-3,
        net_arch=(32,),
        residual_basis=1,
        batch_size=128,
        epochs=8,
        target_kl=None,
    )
    collector = RolloutCollector(env, learner, 0.98)
    for number in range(14):
        rollout = collector.collect(64, lambda *_: None)
        if number == 0:
            kept = {key: value.flatten(0, 1) for key, value in rollout.observations.items()}
            learner.policy.normalizer.fit(kept["rl_token"], kept["proprio"])
        learner.update(rollout, value_only=number == 0)

    def rate(greedy: bool) -> float:
        toy, won = ToyReach(), 0
        for i in range(100):
            obs, _ = toy.reset(options={"init_state_id": i})
            done = False
            while not done:
                batch = {key: np.asarray(value)[None] for key, value in obs.items()}
                chunk = learner.policy.predict(batch, deterministic=True)[0][0]
                action = chunk.reshape(4, 7) if greedy else obs["vla_action"]
                obs, _, terminated, truncated, _ = toy.step(action)
                done = terminated or truncated
            won += terminated
        return won / 100

    baseline = rate(False)
    assert baseline < 0.6
    assert rate(True) >= baseline + 0.25


def test_a_run_resumes_bit_for_bit_and_its_policy_loads(tmp_path: Path) -> None:
    whole = train_ppo_actor(PPOActorConfig(run_dir=tmp_path / "whole", **SMALL))
    part = {**SMALL, "total_timesteps": 128}
    train_ppo_actor(PPOActorConfig(run_dir=tmp_path / "part", **part))
    config = PPOActorConfig(run_dir=tmp_path / "part", **SMALL)
    resumed = resume_ppo_actor(tmp_path / "part", config)
    tensors = []
    for name in ("whole", "part"):
        newest = RunDir(tmp_path / name).checkpoints()[-1]
        assert newest.name == "000000256"
        content = zipfile.ZipFile(newest / "model.zip").read("policy.pth")
        policy = torch.load(io.BytesIO(content), weights_only=True)
        value = torch.load(newest / "learner.pt", weights_only=True)["value"]
        tensors.append({**policy, **{f"value.{key}": tensor for key, tensor in value.items()}})
    assert tensors[0]["actor.head.weight"].abs().max() > 0
    for key, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][key]), key
    rows = [
        [{k: v for k, v in row.items() if k not in TIME_KEYS} for row in read_metrics(path)]
        for path in (tmp_path / "whole/metrics.jsonl", tmp_path / "part/metrics.jsonl")
    ]
    assert rows[0] == rows[1]
    for run in (whole, resumed):
        assert run.card["kind"] == "ppo-actor"
        assert run.card["results"]["training"]["chunks"] == 256
        assert run.card["results"]["policy"][0]["reference_rms"] > 0
    obs = ToyReach().reset(seed=1)[0]
    first, second = (load_policy(run.run_dir).predict(obs)[0] for run in (whole, resumed))
    np.testing.assert_array_equal(first, second)

    with pytest.raises(ConfigError, match="clip"):
        resume_ppo_actor(tmp_path / "part", PPOActorConfig(**{**SMALL, "clip": 0.1}))
    damaged = RunDir(tmp_path / "part").checkpoints()[-1] / "learner.pt"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(WeightsError, match="no whole checkpoint"):
        resume_ppo_actor(tmp_path / "part")


def test_ctrl_c_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = PPOLoop._learn

    def interrupt(self: PPOLoop, rollout: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return learn(self, rollout)

    monkeypatch.setattr(PPOLoop, "_learn", interrupt)
    changes = {**SMALL, "checkpoint_every": 10_000, "eval_every": 0, "eval_states": 0}
    with pytest.raises(KeyboardInterrupt, match=f"vla-gym-train ppo-actor --resume {tmp_path}"):
        train_ppo_actor(PPOActorConfig(run_dir=tmp_path, **changes))
    (checkpoint,) = RunDir(tmp_path).checkpoints()
    assert 0 < int(checkpoint.name) < 256
    monkeypatch.setattr(PPOLoop, "_learn", learn)
    assert resume_ppo_actor(tmp_path).card["results"]["training"]["chunks"] == 256


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout_chunks"):
        PPOActorConfig(num_envs=8, rollout_chunks=8)
    with pytest.raises(ConfigError, match="min_sigma"):
        PPOSettings(sigma=0.001)
    (tmp_path / "config.json").write_text(json.dumps({"nonsense": 1}))
    assert main(["ppo-actor", "--resume", str(tmp_path)]) == 2
