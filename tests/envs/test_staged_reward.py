"""Staged rewards: what each condition of a goal is worth, on episodes of scripted experts."""

from __future__ import annotations

import numpy as np
import pytest

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError
from vla_gym.experts import make_expert
from vla_gym.experts.registry import _BUILDERS
from vla_gym.suites import get_suite
from vla_gym.suites.libero.suite import LiberoSuite
from vla_gym.vector import LiberoVectorEnv

TURN_ON_STOVE = 7  # of goal
STOVE_AND_POT = 2  # of libero_10: turnon flat_stove_1 and on moka_pot_1 flat_stove_1_cook_region
STAGED = {"cameras": (), "reward": "staged"}
FIRST = {"init_state_id": 0}


@pytest.fixture(scope="module")
def half() -> tuple[np.ndarray, list[float], list[float]]:
    """Actions of an expert that reaches one of two conditions, then stays; rewards, progress."""
    env = LiberoEnv("10", task_ids=STOVE_AND_POT, **STAGED)
    _, info = env.reset(seed=0, options=FIRST)
    expert = _BUILDERS["goal"][TURN_ON_STOVE](env.sim)
    actions, rewards, progress = [], [], [info["progress"]]
    while len(actions) < 150 and (progress[-1] < 0.5 or len(actions) % 8):
        action = expert.act() if progress[-1] < 0.5 else np.array([0.0, 0, 0, 0, 0, 0, 1])
        actions.append(action.astype(np.float32))
        _, reward, terminated, truncated, info = env.step(actions[-1])
        assert not (terminated or truncated or info["success"])
        rewards.append(reward)
        progress.append(info["progress"])
    return np.array(actions), rewards, progress


def test_one_of_two_conditions_is_worth_a_half(half):
    _, rewards, progress = half
    assert progress[0] == 0.0 and progress[-1] == 0.5
    np.testing.assert_array_equal(rewards, np.diff(progress))
    assert rewards.count(0.5) - rewards.count(-0.5) == 1 and sum(rewards) == 0.5
    assert set(rewards) <= {0.0, 0.5, -0.5}


def test_inside_a_chunk_each_gain_is_discounted(half):
    actions, rewards, progress = half
    gamma = 0.9
    env = LiberoEnv("10", task_ids=STOVE_AND_POT, chunk_len=8, gamma=gamma, **STAGED)
    env.reset(seed=0, options=FIRST)
    for k, chunk in enumerate(actions.reshape(-1, 8, 7)):
        _, reward, *_, info = env.step(chunk)
        expected = np.dot(gamma ** np.arange(8), rewards[8 * k : 8 * k + 8])
        assert reward == pytest.approx(expected, abs=1e-12)
        assert info["progress"] == progress[8 * (k + 1)]
    assert expected > 0


def test_the_vector_environment_gives_the_same_and_states_carry_it(half):
    actions, rewards, progress = half
    envs = LiberoVectorEnv(1, "10", task_ids=STOVE_AND_POT, workers=0, chunk_len=8, **STAGED)
    _, infos = envs.reset(seed=0, options=FIRST)
    assert infos["progress"].tolist() == [0.0]
    chunks = actions.reshape(-1, 1, 8, 7)
    for chunk in chunks[:-1]:
        envs.step(chunk)
    before = envs.get_state()
    for _ in range(2):
        _, reward, *_, infos = envs.step(chunks[-1])
        assert infos["progress"].tolist() == [progress[-1]]
        assert infos["progress"].dtype == np.float64
        assert reward.tolist() == [sum(rewards[-8:])]
        envs.set_state(before)
    envs.close()


def test_with_one_condition_it_is_the_sparse_reward():
    sparse = LiberoEnv("goal", task_ids=TURN_ON_STOVE, cameras=())
    staged = LiberoEnv("goal", task_ids=TURN_ON_STOVE, **STAGED)
    _, info = sparse.reset(seed=0, options=FIRST)
    assert "progress" not in info
    _, info = staged.reset(seed=0, options=FIRST)
    assert info["progress"] == 0.0
    expert, ended = make_expert(sparse.sim), False
    while not ended:
        action = expert.act().astype(np.float32)
        expected, (_, *found, info) = sparse.step(action), staged.step(action)
        assert tuple(found) == expected[1:4]
        assert info["progress"] == float(expected[4]["success"])
        ended = expected[2] or expected[3]
    assert expected[2] and found[0] == 1.0


def test_wrong_rewards(monkeypatch):
    with pytest.raises(ConfigError, match="reward must be one of 'sparse', 'staged'; got 'dense'"):
        LiberoEnv("goal", reward="dense")
    assert get_suite("goal+10").has_progress
    monkeypatch.setattr(LiberoSuite, "has_progress", False)
    with pytest.raises(ConfigError, match="'goal' does not tell how much of a goal"):
        LiberoEnv("goal", reward="staged")
