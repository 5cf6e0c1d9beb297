"""TD3BC as an SB3 algorithm on a toy task: start, learning, determinism, save and load."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv
from td3_toys import td3_bc
from toy_env import ToyReach

from vla_gym.errors import ConfigError
from vla_gym_trainers import TD3BC, TD3Config

FAST: dict[str, Any] = {
    "gamma": 0.98,  # of ToyReach
    "learning_starts": 60,
    "critic_warmup_steps": 20,
    "batch_size": 32,
    "utd_ratio": 1.0,
    "net_arch": (16, 16),
    "ahead": 0,
}


def make(env: Any = None, seed: int = 3, **changes: Any) -> TD3BC:
    return td3_bc(env, seed, **{**FAST, **changes})


def success_rate(model: TD3BC | None, episodes: int = 100) -> float:
    """Greedy success on fixed starts; None plays the reference."""
    env, successes = ToyReach(), 0
    for i in range(episodes):
        obs, _ = env.reset(options={"init_state_id": i})
        done = False
        while not done:
            action = (
                obs["vla_action"] if model is None else model.predict(obs, deterministic=True)[0]
            )
            obs, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        successes += terminated
    return successes / episodes


def greedy_actions(model: TD3BC) -> np.ndarray:
    env, actions = ToyReach(), []
    for i in range(5):
        obs, _ = env.reset(options={"init_state_id": i})
        actions.append(model.predict(obs, deterministic=True)[0])
    return np.stack(actions)


@pytest.mark.parametrize("fact", [{"worker_restarted": True}, {"demo_steps": 3}])
def test_episodes_cut_off_or_begun_inside_demonstrations_are_not_in_the_means(fact):
    class Marked(ToyReach):
        def _info(self, success: bool, executed: int) -> dict[str, Any]:
            return {**super()._info(success, executed), **fact}

    model = make(Marked()).learn(40)
    assert model._episode_num and not model.ep_info_buffer and not model.ep_success_buffer


def test_learning_again_begins_new_episodes() -> None:
    env = ToyReach(max_control_steps=12)  # 3 chunks
    env.bias -= 9.0  # away from the goal
    model = make(env).learn(8)
    model.learn(8)
    model.set_env(DummyVecEnv([lambda: env]))
    model.learn(8, reset_num_timesteps=False)
    returns = model.replay_buffer.mc_returns[:24].reshape(3, 8)
    np.testing.assert_array_equal(returns, [[0.0] * 6 + [np.nan] * 2] * 3)


def test_untrained_actor_is_exactly_the_reference() -> None:
    model, env = make(net_arch=(256, 256)), ToyReach()
    obs, _ = env.reset(seed=0)
    action, _ = model.predict(obs, deterministic=True)
    np.testing.assert_array_equal(action, obs["vla_action"])
    batch = {key: np.stack([value, value]) for key, value in obs.items()}
    assert model.predict(batch)[0].shape == (2, 4, 7)


def test_actor_moves_only_after_warm_up() -> None:
    model, reference = make(), greedy_actions(make())
    model.learn(56)  # blocks of 8 chunks: all of it warm-up
    np.testing.assert_array_equal(greedy_actions(model), reference)
    assert not model._critics_are_warm
    model.config.critic_warmup_steps = 50
    model.config.utd_ratio = 0.0
    model.learn(8, reset_num_timesteps=False)  # critics only
    assert model._critics_are_warm
    np.testing.assert_array_equal(greedy_actions(model), reference)
    model.config.utd_ratio = 1.0
    model.learn(8, reset_num_timesteps=False)
    assert np.abs(greedy_actions(model) - reference).max() > 0


def test_numbers_of_the_config_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"TD3Config\(batch_size=\.\.\.\).*got batch_size, gamma"):
        TD3BC("RLTokenPolicy", ToyReach(), gamma=0.9, batch_size=8)


def test_another_policy_or_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy must be 'RLTokenPolicy'.*'MultiInputPolicy'"):
        TD3BC("MultiInputPolicy", ToyReach())
    with pytest.raises(ConfigError, match="config must be a TD3Config"):
        TD3BC("RLTokenPolicy", ToyReach(), {"gamma": 0.9})  # type: ignore[arg-type]


def test_another_gamma_than_the_environments_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"gamma=0\.98, which is used, not by the config's 0\.9:"):
        make(gamma=0.9).learn(8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The environments discount")
        make(gamma=0.98).learn(8)


def test_learns_beyond_the_reference() -> None:
    model = make(
        learning_starts=400,
        critic_warmup_steps=300,
        batch_size=128,
        utd_ratio=2.5,
        learning_rate=1e-3,
        bc_weight=0.02,
        noise_chunk=0.3,
        net_arch=(64, 64),
        seed=0,
    )
    baseline = success_rate(None)
    model.learn(800)
    # 45 of 100 by the reference; 70 of 100 by chance has a probability below 1e-6. Three seeds:
    # 92-97.
    assert baseline < 0.6
    assert success_rate(model) >= baseline + 0.25


@pytest.mark.parametrize("ahead", [0, 1])
def test_same_seed_same_result(ahead: int) -> None:
    results = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        model = make(ahead=ahead)
        model.learn(120)
        results.append((greedy_actions(model), model.replay_buffer.actions[:120].copy()))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert np.abs(results[0][0] - greedy_actions(make())).max() > 0


def test_save_and_load_give_equal_actions_and_go_on(tmp_path: Path) -> None:
    model = make()
    model.learn(90)
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "replay.pkl")
    loaded = TD3BC.load(tmp_path / "model.zip", env=ToyReach())
    np.testing.assert_array_equal(greedy_actions(loaded), greedy_actions(model))
    assert (loaded.num_timesteps, loaded.config) == (model.num_timesteps, model.config)
    loaded.load_replay_buffer(tmp_path / "replay.pkl")
    for trained in (model, loaded):  # same optimisers, generators and replay: same gradient steps
        trained.set_logger(model.logger)
        trained.train(gradient_steps=5, batch_size=16)
    np.testing.assert_array_equal(greedy_actions(loaded), greedy_actions(model))


def test_environments_of_gymnasium_are_taken_anywhere(tmp_path: Path) -> None:
    def envs() -> SyncVectorEnv:
        return SyncVectorEnv([ToyReach] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    model = make(envs()).learn(8)
    model.save(tmp_path / "model.zip")
    loaded = TD3BC.load(tmp_path / "model.zip", env=envs())
    loaded.learn(8, reset_num_timesteps=False)
    loaded.set_env(envs())
    assert loaded.learn(8, reset_num_timesteps=False).num_timesteps == 3 * 16


def test_settings_that_change_between_steps_count_at_once() -> None:
    model = make().learn(90)
    target = [weights.clone() for weights in model.policy.critic_target.parameters()]
    model.config = replace(model.config, tau=0.0)
    model.train(8, 16)
    for before, now in zip(target, model.policy.critic_target.parameters(), strict=True):
        torch.testing.assert_close(now, before, atol=0.0, rtol=0.0)


def test_a_model_of_a_gpu_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    model = make()
    model._rng = SimpleNamespace(get_state=lambda: torch.zeros(16))  # as long as a GPU's
    model.save(tmp_path / "model.zip")
    loaded = TD3BC.load(tmp_path / "model.zip", env=ToyReach(), device="cpu")
    np.testing.assert_array_equal(greedy_actions(loaded), greedy_actions(model))


def test_parallel_envs_callbacks_and_metrics(tmp_path: Path) -> None:
    steps = []

    def callback(*_: Any) -> bool:
        steps.append(model.num_timesteps)
        return True

    model = make(DummyVecEnv([ToyReach, ToyReach]), train_freq=4)
    model.tensorboard_log = str(tmp_path)
    model.learn(120, callback=callback, log_interval=1)
    assert steps == list(range(2, 121, 2))
    assert model.replay_buffer.num_added == 120
    # blocks of 2 x 4 chunks; the 8 of them that end after chunk 60 (64, 72, ..., 120) learn
    assert model._n_updates == 64
    assert list(tmp_path.rglob("events.out.tfevents*"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", 5.0),
        ("value_range", (1.0, 0.0)),
        ("value_range", (math.nan, 1.0)),
        ("action_scale", (1.0, 0.0)),
        ("net_arch", ()),
        ("net_arch", (16, 0)),
        ("residual_scale", -1.0),
        ("bc_weight_end", 0.1),
    ],
)
def test_bad_settings(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: (.* )?expected"):
        TD3Config(**{name: value})


def test_wrong_spaces_are_refused() -> None:
    env = ToyReach()
    del env.observation_space.spaces["rl_token"]
    with pytest.raises(ConfigError, match="rl_token"):
        make(env)
