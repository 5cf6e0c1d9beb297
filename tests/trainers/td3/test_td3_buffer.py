"""The chunk replay ring: discounts, returns, time limits, faults, wrap-around."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.vec_env import DummyVecEnv
from toy_env import ToyReach

from vla_gym.errors import ConfigError
from vla_gym_trainers.td3.replay import ChunkReplayBuffer

OBSERVATION = spaces.Dict(
    {"rl_token": spaces.Box(-np.inf, np.inf, (2,), np.float32), "task_id": spaces.Discrete(10)}
)
ACTION = spaces.Box(-1.0, 1.0, (2, 7), np.float32)


def make(size: int = 10, n_envs: int = 1, **kwargs: Any) -> ChunkReplayBuffer:
    return ChunkReplayBuffer(size, OBSERVATION, ACTION, "cpu", n_envs, gamma=0.9, seed=0, **kwargs)


def push(
    buffer: ChunkReplayBuffer,
    tags: list[float],
    rewards: list[float] | None = None,
    dones: list[bool] | None = None,
    infos: list[dict[str, Any]] | None = None,
    tasks: list[int] | None = None,
) -> None:
    """Add one transition per env; ``tags`` marks each in its observation and action."""
    n = len(tags)
    obs = {
        "rl_token": np.array([[tag, 0.0] for tag in tags], np.float32),
        "task_id": np.array(tasks or range(n)),
    }
    after = {"rl_token": obs["rl_token"] + 0.5, "task_id": obs["task_id"]}
    action = np.stack([np.full((2, 7), tag / 100) for tag in tags])
    default = [{"discount": 0.81} for _ in tags]
    buffer.add(
        obs,
        after,
        action,
        np.array(rewards or [0.0] * n),
        np.array(dones or [False] * n),
        infos or default,
    )


def test_time_limit_is_not_terminal_and_its_return_is_zero() -> None:
    buffer = make()
    push(buffer, [0])
    push(buffer, [1], [0.0], [True], [{"discount": 0.9, "TimeLimit.truncated": True}])
    assert buffer.dones[:2].tolist() == [0.0, 0.0]
    assert buffer.mc_returns[:2].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(buffer.discounts[:2], [0.81, 0.9], rtol=1e-6)


def test_discount_falls_back_to_executed_steps_then_to_gamma() -> None:
    buffer = make()
    push(buffer, [0], infos=[{"executed_steps": 3}])
    push(buffer, [1], infos=[{}])
    np.testing.assert_allclose(buffer.discounts[:2], [0.9**3, 0.9], rtol=1e-6)


def test_episodes_of_parallel_envs_do_not_mix() -> None:
    buffer = make(n_envs=2)
    push(buffer, [0, 10])
    push(buffer, [1, 11], [1.0, 0.0], [True, False])
    push(buffer, [2, 12], [0.0, 0.5], [False, True])
    # slots: env0 env1 env0 env1 env0 env1
    expected = [0.81, 0.81**2 * 0.5, 1.0, 0.81 * 0.5, math.nan, 0.5]
    np.testing.assert_allclose(buffer.mc_returns[:6], expected, rtol=1e-6)


def test_a_restarted_worker_and_broken_numbers_are_never_stored() -> None:
    buffer = make(n_envs=2)
    push(buffer, [0, 10])
    dead = {"discount": 1.0, "TimeLimit.truncated": True, "worker_restarted": True}
    push(buffer, [1, 11], dones=[True, False], infos=[dead, {"discount": 0.81}])
    assert buffer.size() == 3
    assert buffer.observations["rl_token"][:3, 0].tolist() == [0.0, 10.0, 11.0]
    assert np.isnan(buffer.mc_returns[0])  # its episode has no known end
    push(buffer, [2, math.nan])
    assert buffer.size() == 4
    assert np.isfinite(buffer.observations["rl_token"][:4]).all()
    # the broken row cuts env 1's chain: earlier rows must not get a return through the gap
    push(buffer, [3, 13], [0.0, 1.0], [False, True])
    np.testing.assert_equal(buffer.mc_returns[[1, 2]], [math.nan, math.nan])


def test_ring_overwrites_the_oldest_and_keeps_returns_right() -> None:
    buffer = make(size=4)
    for tag in range(6):
        push(buffer, [tag])
    push(buffer, [6], [1.0], [True])
    # 7 transitions in one episode, only the last 4 are left: tags 3 4 5 6 in slots 3 0 1 2
    np.testing.assert_allclose(buffer.mc_returns, [0.81**2, 0.81, 1.0, 0.81**3], rtol=1e-6)
    push(buffer, [7])
    assert np.isnan(buffer.mc_returns[3])  # a reused slot forgets the old return


def test_samples_are_consistent_rows() -> None:
    buffer = make(size=50)
    for tag in range(30):
        push(buffer, [tag], infos=[{"discount": 0.5 + tag / 100}])
    batch = buffer.sample(200)
    tags = batch.observations["rl_token"][:, 0]
    assert batch.actions.shape == (200, 14)
    assert batch.rewards.shape == batch.discounts.shape == (200, 1)
    np.testing.assert_allclose(batch.actions[:, 0], tags / 100, atol=1e-6)
    np.testing.assert_allclose(batch.next_observations["rl_token"][:, 0], tags + 0.5)
    np.testing.assert_allclose(batch.discounts[:, 0], 0.5 + tags / 100, atol=1e-6)
    assert len(set(tags.tolist())) > 25
    buffer.reset()
    with pytest.raises(ConfigError, match="empty"):
        buffer.sample(1)


def test_sampling_is_seeded_and_apart_from_global_numpy() -> None:
    drawn = []
    for global_seed in (1, 2):
        np.random.seed(global_seed)
        buffer = make()
        for tag in range(8):
            push(buffer, [tag])
        drawn.append(buffer.sample(16).observations["rl_token"][:, 0].tolist())
    assert drawn[0] == drawn[1]


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="Dict"):
        ChunkReplayBuffer(4, ACTION, ACTION)
    with pytest.raises(ConfigError, match="optimize_memory_usage"):
        ChunkReplayBuffer(4, OBSERVATION, ACTION, optimize_memory_usage=True)


def test_dummy_vec_env_terminal_observation_reaches_the_buffer() -> None:
    """SB3's SAME_STEP reset: the stored next observation is the episode's real last one."""
    env = ToyReach(max_control_steps=4)
    model = TD3(
        "MultiInputPolicy",
        DummyVecEnv([lambda: env]),
        replay_buffer_class=ChunkReplayBuffer,
        learning_starts=4,
        train_freq=1,
        batch_size=8,
        policy_kwargs={"net_arch": [16]},
        device="cpu",
        seed=0,
    )
    model.learn(8)  # stock TD3 runs on it and reads .discounts
    buffer = model.replay_buffer
    # every episode is one truncated chunk: it bootstraps, from the end and not from the new start
    assert buffer.dones[:8].tolist() == [0.0] * 8
    np.testing.assert_allclose(buffer.discounts[:8], env.gamma**4, rtol=1e-6)
    moved = buffer.next_observations["proprio"][:8] - buffer.observations["proprio"][:8]
    executed = 0.05 * buffer.actions[:8].reshape(8, 4, 7)[:, :, :3].sum(axis=1)
    np.testing.assert_allclose(moved[:, :3], executed, atol=1e-5)
