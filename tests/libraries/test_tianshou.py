"""Tianshou: its example trains, and its replay buffer is right."""

import gymnasium as gym
import numpy as np
import pytest
from episode_clock import FLAT, LIMIT, check_transitions

from vla_gym.errors import ConfigError, InvalidActionError

pytest.importorskip("tianshou", reason="tianshou is not installed")


def test_replay():
    from examples.tianshou_sac import train

    buffer, result = train(60, **FLAT)
    data, _ = buffer.sample(0)  # all, in order
    assert len(data) == 60 and result.train_step == 60 and result.update_step > 0
    check_transitions(data.obs, data.obs_next, data.rew, data.terminated, data.truncated)
    np.testing.assert_allclose(data.info.discount, 0.99**8)


def test_some_environments_at_a_time():
    from vla_gym.integrations.tianshou import TianshouVectorEnv

    options = {**FLAT, "flat": True, "autoreset_mode": "DISABLED"}
    env = TianshouVectorEnv(gym.make_vec("LiberoVLA-goal-v0", 3, **options))
    obs, infos = env.reset()
    assert len(env) == len(obs) == len(infos) == 3 and env.action_space[0].shape == (56,)
    actions = np.zeros((2, 56), np.float32)
    for chunk in range(1, LIMIT + 1):
        # In their order, not ours.
        obs, rewards, terminated, truncated, infos = env.step(actions, np.array([2, 0]))
        assert [info["env_id"] for info in infos] == [2, 0]
        assert obs[:, 1].tolist() == [chunk] * 2 and not terminated.any()
    assert truncated.all() and rewards.shape == (2,)
    obs, _ = env.reset(np.array([0]))
    assert obs[:, :3].tolist() == [[1, 0, 0]]
    obs, *_ = env.step(actions, [1, 0])
    assert obs[:, :2].tolist() == [[0, 1], [1, 1]]  # the first of them had not moved
    env.close()


def test_wrong_environments():
    from vla_gym.integrations.tianshou import TianshouVectorEnv

    envs = gym.make_vec("LiberoVLA-goal-v0", 2, **FLAT, flat=True)
    with pytest.raises(ConfigError, match="autoreset_mode='DISABLED'"):
        TianshouVectorEnv(envs)
    envs.close()
    envs = gym.make_vec("LiberoVLA-goal-v0", 2, **FLAT, autoreset_mode="DISABLED")
    with pytest.raises(ConfigError, match="flat=True"):
        TianshouVectorEnv(envs)
    envs.close()


def test_seeds_and_wrong_actions():
    from vla_gym.integrations.tianshou import TianshouVectorEnv

    options = {**FLAT, "flat": True, "autoreset_mode": "DISABLED"}
    env = TianshouVectorEnv(gym.make_vec("LiberoVLA-goal-v0", 2, **options))
    drawn = []
    for _ in range(2):
        env.seed(7)
        drawn.append([space.sample() for space in env.action_space])
    np.testing.assert_array_equal(*drawn)
    assert (drawn[0][0] != drawn[0][1]).all()
    for actions, ids in ((1, None), (2, [0, 0]), (1, [0, 1])):
        with pytest.raises(InvalidActionError, match="each once"):
            env.step(np.zeros((actions, 56), np.float32), ids)
    env.close()
