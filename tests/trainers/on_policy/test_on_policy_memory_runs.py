"""Runs of recurrent policies: a task that needs a memory, resuming, playing, mistakes."""

from dataclasses import fields

import numpy as np
import pytest
from on_policy_toys import chunks_of
from run_logs import assert_goes_on, rows_of
from safetensors.torch import load_file
from test_on_policy_memory import SIZE, recurrent
from test_on_policy_rl_token import SMALL as RL_TOKEN
from test_on_policy_train import SMALL
from toy_memory_env import ProprioVLA, memory_envs, memory_factories

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.rollout.episodes import sampled_starts
from vla_gym_trainers.evaluation.actor_policy import ActorPolicy
from vla_gym_trainers.evaluation.trained import load_policy
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.on_policy.train import train
from vla_gym_trainers.on_policy.validation import PolicyPlayer

LEARNING = {
    **SMALL,
    **RL_TOKEN,
    "num_envs": 16,
    "rollout_chunks": 24,
    "chunk_len": 4,
    "residual_basis": 1,
    "sigma": 0.3,
    "learning_rate": 5e-3,
    "epochs": 6,
    "num_minibatches": 4,
}


def run(folder, kind=PPOConfig, **changes):
    known = {field.name for field in fields(kind)}  # GRPO has no value head
    settings = {**LEARNING, "run_dir": folder, **changes}
    config = kind(**{name: value for name, value in settings.items() if name in known})
    return train(config, vla=ProprioVLA(), envs=memory_factories(config))


def played(player, num_envs=3, layouts=12, **kwargs):
    """Chunks of each start's episode, and its success."""
    envs = memory_envs(num_envs, autoreset_mode="DISABLED", **kwargs)
    chunks, episodes = chunks_of(player, envs, sampled_starts("goal", (0, 1), layouts, 7))
    return chunks, [episode.success for episode in sorted(episodes, key=lambda e: e.start)]


def test_ppo_learns_with_a_memory(tmp_path):
    result = run(tmp_path / "run", memory_size=16, total_steps=12_000)
    rates = [rate for _, rate in result.card["results"]["training"]["success"]]  # with draws
    assert rates[0] < 0.65 and sum(rates[-3:]) / 3 > 0.8
    player = ActorPolicy(load_policy(tmp_path / "run"), ProprioVLA(), None, 4)
    assert np.mean(played(player)[1]) > 0.95


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_start": "recomputed", "value_epochs": 1, "kl_coef": 0.1, "eval_every": 300},
        {"memory_start": "stored", "sequential_training": False, "ahead": 1},
        {"kind": GRPOConfig, "episodes_per_env": 2, "group_size": 2},
    ],
)
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, changes):
    # Rows of 7 chunks, episodes of 3, a checkpoint every 2 rollouts: within an episode.
    small = {"memory_size": 5, "bptt_length": 2, "num_envs": 4, "rollout_chunks": 7, "epochs": 2}
    changes = {**small, "total_steps": 900, "checkpoint_every": 200, **changes}
    whole = assert_goes_on(run, tmp_path, **changes)
    assert "actor.gru.weight_hh" in load_file(whole / "last.safetensors")


@pytest.fixture
def policy():
    return recurrent(chunk_len=4)


def saved(policy, folder):
    policy.actor.save(folder)
    return load_policy(folder)


def test_who_plays_carries_a_memory_for_each_episode(policy, tmp_path):
    """Whatever the number of environments; as by hand, chunk by chunk."""
    model = saved(policy, tmp_path)
    chunks, _ = played(ActorPolicy(model, ProprioVLA(), None, 4), num_envs=1)
    assert len(chunks) == 2 * 12 * 3
    for player in (
        ActorPolicy(model, ProprioVLA(), None, 4),
        PolicyPlayer(policy.act, policy, 4),
    ):
        again, _ = played(player, num_envs=5)
        assert again.keys() == chunks.keys()
        assert all(np.array_equal(again[key], chunks[key]) for key in chunks)
    for task, seed in {key[:2] for key in chunks}:
        state = None
        for step in (0, 4, 8):
            proprio = np.zeros(8, np.float32)
            proprio[0] = 0.0 if step else 1 - 2 * task
            features = {"rl_token": proprio, "proprio": proprio, "vla_action": np.zeros((4, 7))}
            chunk, state = model.predict(features, state)
            np.testing.assert_allclose(chunk, chunks[task, seed, step], atol=1e-6)
    by_step = [np.stack([v for k, v in chunks.items() if k[2] == step]) for step in (4, 8)]
    assert np.abs(by_step[0] - by_step[1]).max() > 1e-3  # shown the same, remembered more


def test_an_episode_that_is_played_again_remembers_nothing(policy, tmp_path):
    expected, won = played(PolicyPlayer(policy.act, policy, 4), num_envs=2, layouts=2)
    with pytest.warns(WorkerRestartWarning):
        chunks, again = played(
            PolicyPlayer(policy.act, policy, 4),
            num_envs=2,
            layouts=2,
            workers=1,
            die_in=(0, str(tmp_path / "died")),
        )
    assert (tmp_path / "died").exists() and again == won
    assert all(np.array_equal(chunks[key], expected[key]) for key in expected)


def test_a_teacher_plays_without_memory(policy):
    from vla_gym_trainers.on_policy.rl_token_policy import vla_chunks

    chunks, _ = played(PolicyPlayer(vla_chunks, policy, 4), layouts=2)
    assert len(chunks) == 12 and not any(chunk.any() for chunk in chunks.values())


def test_predict_takes_and_returns_a_state(policy, tmp_path):
    model = saved(policy, tmp_path)
    rng = np.random.default_rng(0)
    features = {
        "rl_token": rng.normal(size=(3, 8)).astype(np.float32),
        "proprio": rng.normal(size=(3, 8)).astype(np.float32),
        "vla_action": rng.uniform(-0.1, 0.1, (3, 4, 7)).astype(np.float32),
    }
    first, state = model.predict(features)
    assert [part.shape for part in state] == [(3, SIZE), (3, 4, 7)]
    assert np.array_equal(state[1], first)
    second, _ = model.predict(features, state)
    assert (np.abs(second - first).max(axis=(1, 2)) > 1e-4).all()
    mixed, _ = model.predict(features, state, np.array([True, False, True]))
    np.testing.assert_allclose(mixed, np.stack([first[0], second[1], first[2]]), atol=1e-6)
    one = {key: value[1] for key, value in features.items()}
    alone, after = model.predict(one, tuple(part[1:2] for part in state))
    np.testing.assert_allclose(alone, second[1], atol=1e-6)
    assert after[0].shape == (1, SIZE)
    with pytest.raises(ConfigError, match=r"arrays \(3, 6\) and \(3, 4, 7\), got \(\(1, 6\)"):
        model.predict(features, after)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bptt_length": 25}, "bptt_length must be at most 24, the chunks of a row, got 25"),
        ({"policy": "tokens"}, "policy tokens has no memory"),
        ({"micro_batch_size": 7}, r"micro_batch_size \(7\) must be at least bptt_length \(8\)"),
    ],
)
def test_settings_are_checked(wrong, words):
    right = {**LEARNING, "memory_size": 4}
    PPOConfig(**right)
    with pytest.raises(ConfigError, match=words):
        PPOConfig(**{**right, **wrong})


def test_windows_longer_than_episodes_are_named_before_anything_is_played(tmp_path):
    with pytest.raises(ConfigError, match="bptt_length must be at most 3.*got 8"):
        run(tmp_path / "run", memory_size=4, episodes_per_env=2)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not rows_of(tmp_path / "run")
    # Without a memory, and with windows of one chunk, it does not matter.
    PPOConfig(**{**LEARNING, "bptt_length": 99})
    PPOConfig(**{**LEARNING, "memory_size": 4, "bptt_length": 99, "sequential_training": False})
