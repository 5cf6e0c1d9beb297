"""The chunk replay ring: discounts, returns, faults, wrap-around, draws by task, pickling."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.vec_env import DummyVecEnv
from toy_env import ToyReach

from vla_gym.errors import ConfigError
from vla_gym_trainers.rollout.chunks import Piece
from vla_gym_trainers.td3.replay import ChunkReplayBuffer
from vla_gym_trainers.td3.tensordicts import replay_tensordict

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


def test_the_ring_is_the_newest_rows_of_a_list() -> None:
    """Against a list, with rows left out and pushes that wrap around."""
    rng, buffer, kept = np.random.default_rng(0), make(size=13, n_envs=4), []
    for step in range(40):
        tags = [float(10 * step + i) for i in range(4)]
        bad = rng.random(4) < 0.3
        push(buffer, [np.nan if b else t for t, b in zip(tags, bad, strict=True)])
        kept += [t for t, b in zip(tags, bad, strict=True) if not b]
        size = min(len(kept), 13)
        assert (buffer.size(), buffer.num_added) == (size, len(kept))
        in_order = (np.arange(len(kept) - size, len(kept))) % 13
        assert buffer.observations["rl_token"][in_order, 0].tolist() == kept[-size:]


def test_task_index_against_brute_force() -> None:
    """Over many turns of the ring: counts, even shares, every slot, the same after pickling."""
    rng, buffer, tasks = np.random.default_rng(1), make(size=50, balanced=True), {}
    for number in range(300):
        tasks[number % 50] = task = int(rng.choice([2, 5, 7], p=[0.8, 0.15, 0.05]))
        push(buffer, [float(number)], tasks=[task])
        if number % 37 == 0:
            values = list(tasks.values())
            assert buffer.task_counts == {task: values.count(task) for task in sorted({*values})}
            drawn = buffer.sample(61).observations["task_id"][:, 0].tolist()
            shares = [drawn.count(task) for task in buffer.task_counts]
            assert sum(shares) == 61 and max(shares) - min(shares) <= 1
            buffer = pickle.loads(pickle.dumps(buffer))  # and it goes on
    newest = buffer.sample(5000).observations["rl_token"][:, 0]
    assert sorted(set(newest.tolist())) == list(range(250, 300))
    buffer.reset()
    assert (buffer.size(), buffer.task_counts) == (0, {})


def test_weighted_batches_hold_tasks_in_proportion() -> None:
    """Of 60 rows weights of 2, 1 and (not named) 1 make 30, 15 and 15; half of a prior's task."""
    buffer, prior = make(size=300, balanced=True), make(size=9, balanced=True)
    for step in range(300):
        push(buffer, [float(step)], tasks=[2 if step < 10 else 5 if step < 50 else 7])
    buffer.task_weights = {2: 2.0, 5: 1.0, 8: 50.0}
    counts = np.bincount(buffer.sample(60).observations["task_id"][:, 0], minlength=10)
    assert counts[[2, 5, 7]].tolist() == [30, 15, 15]
    drawn = [np.bincount(buffer.sample(2).observations["task_id"][:, 0]) for _ in range(400)]
    rare = np.mean([counts[5] for counts in drawn])  # half a row: rounded up every other time
    assert abs(rare - 0.5) < 0.1 and all(counts.sum() == 2 for counts in drawn)
    for task in (2, 2, 2, 2, 2, 5):
        push(prior, [900.0], tasks=[task])
    buffer.prior = prior
    batch = buffer.sample(80)
    shown = batch.observations["rl_token"][:, 0] == 900.0
    tasks = batch.observations["task_id"][:, 0]
    # half of what tasks 2 and 5 have of 80; the other 50 rows are of all tasks
    assert np.bincount(tasks[shown], minlength=10)[[2, 5, 7]].tolist() == [20, 10, 0]
    others = np.bincount(tasks[~shown], minlength=10)[[2, 5, 7]]
    assert others.sum() == 50 and np.abs(others - [25, 12.5, 12.5]).max() < 1


def test_pickle_holds_the_filled_rows_only() -> None:
    small, large = make(size=100), make(size=100_000)
    for buffer in (small, large):
        for tag in range(50):
            push(buffer, [float(tag)])
    assert len(pickle.dumps(large)) < 2 * len(pickle.dumps(small))


def test_a_replay_in_torchrls_words() -> None:
    """The oldest first, after a wrap-around; ends and what begins inside chunks included."""
    buffer = make(size=4)

    def step(tag: float, done: bool, limit: bool, pieces: int = 0) -> None:
        info: dict[str, Any] = {"discount": 0.81, "TimeLimit.truncated": limit}
        if pieces:
            after = {"rl_token": np.array([tag + 0.5, 0.5], np.float32), "task_id": np.int64(2)}
            info |= {"pieces": [Piece(after, float(k), 0.9) for k in range(pieces)], "stride": 1}
        push(buffer, [tag], [tag], [done], [info], tasks=[2])

    for tag, done, limit in (
        (0.0, False, False),
        (1.0, True, False),
        (2.0, False, False),
        (3.0, True, True),
        (4.0, False, False),
    ):
        step(tag, done, limit)
    found = replay_tensordict(buffer)
    assert found.batch_size == (4,) and found["action"].shape == (4, 2, 7)
    assert found["rl_token"][:, 0].tolist() == [1, 2, 3, 4]
    assert found["next", "rl_token"][:, 0].tolist() == [1.5, 2.5, 3.5, 4.5]
    assert found["next", "reward"].flatten().tolist() == [1, 2, 3, 4]
    assert found["next", "terminated"].flatten().tolist() == [True, False, False, False]
    assert found["next", "truncated"].flatten().tolist() == [False, False, True, False]
    assert found["next", "done"].flatten().tolist() == [True, False, True, False]
    np.testing.assert_allclose(found["next", "discount"], np.full((4, 1), 0.81), rtol=1e-6)
    assert found["task_id"].tolist() == [2] * 4 and found["task_id"].dtype == torch.int64
    found["rl_token"].zero_()  # a copy
    assert buffer.observations["rl_token"].any()

    for limit in (False, True):
        buffer.reset()
        step(0.0, False, False, pieces=2)
        step(1.0, True, limit, pieces=2)
        ends = replay_tensordict(buffer)["next"]
        # The second chunk, and the window that begins inside it.
        assert int(ends["done"].sum()) == 2
        assert torch.equal(ends["truncated"], ends["done"] & torch.tensor(limit))

    buffer.reset()
    buffer._ring.shapes["obs/vla_input"] = (4,)
    with pytest.raises(ConfigError, match="keep_inputs.*without vla_update_freq"):
        replay_tensordict(buffer)
