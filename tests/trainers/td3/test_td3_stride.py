"""Chunks in pieces: nothing that happens is another, and what is seen inside reaches the replay."""

from __future__ import annotations

import pickle
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from td3_toys import td3_bc
from toy_env import InPieces, in_process

from vla_gym.errors import ConfigError
from vla_gym_trainers.rollout.chunks import ChunkEnvs, Piece
from vla_gym_trainers.runs.sb3_vec_env import SB3VecEnv
from vla_gym_trainers.td3.replay import ChunkReplayBuffer

GAMMA = 0.9


def make(rows: int, num_envs: int = 3) -> Any:
    return SB3VecEnv(in_process(lambda _: InPieces(GAMMA, rows), num_envs))


def assert_equal(actual: Any, expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(actual[key], expected[key])


def test_a_chunk_in_pieces_is_the_chunk() -> None:
    with closing(make(2)) as ours, closing(make(4)) as whole:
        assert ours.action_space == whole.action_space
        ours.seed(5), whole.seed(5)
        a, b = ours.reset(), whole.reset()
        assert_equal(a, b)
        ends = {"success": 0, "limit": 0}
        for _ in range(60):
            chunk = b["vla_action"].copy()
            chunk[1:, :, :3] -= [0.3, -0.24, 0.18]  # mends the reference's mistake
            chunk[0] -= 0.3
            chunk = np.clip(chunk, -1, 1)
            mine, its = ours.step(chunk), whole.step(chunk)
            assert_equal(mine[0], its[0])
            np.testing.assert_allclose(mine[1], its[1], rtol=1e-6)
            np.testing.assert_array_equal(mine[2], its[2])
            for info, other in zip(mine[3], its[3], strict=True):
                assert info.pop("stride") == 2
                pieces = info.pop("pieces")
                assert info.pop("discount") == pytest.approx(other.pop("discount"))
                assert info["executed_steps"] == other["executed_steps"]
                assert len(pieces) == -(-other["executed_steps"] // 2)
                if "terminal_observation" in other:
                    kind = "limit" if other["TimeLimit.truncated"] else "success"
                    ends[kind] += 1
                    last = info.pop("terminal_observation")
                    assert_equal(last, other.pop("terminal_observation"))
                    assert_equal(pieces[-1].obs, last)
                    for one in (info, other):
                        one["episode"].pop("t")
                        one["episode"]["r"] = pytest.approx(one["episode"]["r"])
                        value = one["episode_stats"]["return"]
                        one["episode_stats"]["return"] = pytest.approx(value)
                assert info == other
            b = its[0]
        assert min(ends.values()) > 3


def test_the_stride_must_divide_the_chunk() -> None:
    with closing(make(2)) as env, pytest.raises(ConfigError, match="divide"):
        env.vector_env.single_action_space = spaces.Box(-1.0, 1.0, (3, 7), np.float32)
        ChunkEnvs(env.vector_env)


OBSERVATION = spaces.Dict(
    {"rl_token": spaces.Box(-np.inf, np.inf, (1,), np.float32), "task_id": spaces.Discrete(3)}
)


def buffer(size: int = 50) -> Any:
    action = spaces.Box(-1.0, 1.0, (4, 7), np.float32)
    return ChunkReplayBuffer(
        size, OBSERVATION, action, "cpu", 1, gamma=GAMMA, seed=0, balanced=True
    )


def seen(tag: float) -> dict[str, np.ndarray]:
    return {"rl_token": np.array([tag], np.float32), "task_id": np.int64(1)}


def push(into: Any, first: float, executed: list[int], end: str = "", **extra: Any) -> None:
    """Add a chunk from control step ``first``: row t of the action is t / 100."""
    steps = np.cumsum([0, *executed])
    rewards = [0.0] * len(executed)
    if end:
        rewards[-1] = {"success": GAMMA ** (executed[-1] - 1), "broken": np.nan}.get(end, 0.0)
    pieces = [
        Piece(seen(first + stop), reward, GAMMA**count)
        for stop, count, reward in zip(steps[1:], executed, rewards, strict=True)
    ]
    total = sum(GAMMA**start * reward for start, reward in zip(steps, rewards, strict=False))
    info = {
        "pieces": pieces,
        "stride": 2,
        "discount": GAMMA ** steps[-1],
        "TimeLimit.truncated": end == "limit",
        **extra,
    }
    batch = [{k: v[None] for k, v in one.items()} for one in (seen(first), pieces[-1].obs)]
    action = ((first + np.arange(4)) / 100)[None, :, None].repeat(7, axis=2)
    done = np.array([bool(end) or "worker_restarted" in extra])
    into.add(*batch, action, np.array([total]), done, [info])


def stored(of: Any) -> dict[float, tuple[Any, ...]]:
    """By first control step: last one, steps of the actions, reward, discount, done, return."""
    rows = of.rows(np.arange(of.size()))
    return {
        float(rows.observations["rl_token"][i, 0]): (
            float(rows.next_observations["rl_token"][i, 0]),
            [round(float(x) * 100) for x in rows.actions[i].reshape(4, 7)[:, 0]],
            float(rows.rewards[i, 0]),
            float(rows.discounts[i, 0]),
            float(rows.dones[i, 0]),
            float(rows.mc_returns[i, 0]),
        )
        for i in range(of.size())
    }


def test_known_transitions_of_an_episode_that_succeeds_inside_a_chunk() -> None:
    replay = buffer()
    push(replay, 0, [2, 2])
    assert replay.size() == 1
    push(replay, 4, [2, 2])
    assert sorted(stored(replay)) == [0, 2, 4]
    assert np.isnan(stored(replay)[2][-1])
    push(replay, 8, [2, 1], "success")  # in control step 11
    rows = stored(replay)
    # start: (end, actions, reward, gamma^k, done, G = 0.9 ^ (10 - start))
    expected = {
        0: (4, [0, 1, 2, 3], 0.0, 0.9**4, 0),
        2: (6, [2, 3, 4, 5], 0.0, 0.9**4, 0),
        4: (8, [4, 5, 6, 7], 0.0, 0.9**4, 0),
        6: (10, [6, 7, 8, 9], 0.0, 0.9**4, 0),
        8: (11, [8, 9, 10, 11], 0.9**2, 0.9**3, 1),
        10: (11, [10, 11, 11, 11], 1.0, 0.9, 1),  # row 11 was planned, then held
    }
    assert rows.keys() == expected.keys()
    for start, values in expected.items():
        assert rows[start][:2] == values[:2]
        assert rows[start][2:] == pytest.approx((*values[2:], 0.9 ** (10 - start)), abs=1e-6)
    assert replay.task_counts == {1: 6}


def test_a_time_limit_is_no_end() -> None:
    replay = buffer()
    push(replay, 0, [2, 2])
    push(replay, 4, [2], "limit")  # after the first piece of the second chunk
    rows = stored(replay)
    assert sorted(rows) == [0, 2, 4]
    assert rows[2][:2] == (6, [2, 3, 4, 5])
    assert rows[2][2:] == pytest.approx((0.0, 0.9**4, 0.0, 0.0))
    push(replay, 20, [2, 2])  # the next episode takes nothing from this one
    push(replay, 24, [2, 2])
    assert sorted(stored(replay)) == [0, 2, 4, 20, 22, 24]


def test_faults_break_the_chain() -> None:
    replay = buffer()
    push(replay, 0, [2, 2])
    push(replay, np.nan, [2, 2])
    push(replay, 8, [2, 2])
    push(replay, 12, [2, 2])
    assert sorted(stored(replay)) == [0, 8, 10, 12]
    push(replay, 16, [2, 2], worker_restarted=True)
    push(replay, 20, [2, 2])
    push(replay, 24, [2, 2], "broken")
    assert sorted(stored(replay)) == [0, 8, 10, 12, 20]


def test_a_broken_frame_inside_a_chunk_leaves_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, whole = buffer(), seen
    monkeypatch.setitem(globals(), "seen", lambda tag: whole(np.nan if tag == 6 else tag))
    for first, end in ((0, ""), (4, ""), (8, "success")):
        push(replay, first, [2, 2], end)
    rows = stored(replay)
    assert sorted(rows) == [0, 4, 8, 10]
    assert [rows[start][-1] for start in rows] == pytest.approx([0.9**11, 0.9**7, 0.9**3, 0.9])


def test_it_survives_pickling_with_pieces_under_way() -> None:
    mine = buffer(size=5)
    push(mine, 0, [1, 1, 1, 1], stride=1)
    copy = pickle.loads(pickle.dumps(mine))
    for replay in (mine, copy):
        push(replay, 4, [1, 1], "success", stride=1)
    assert sorted(stored(copy)) == sorted(stored(mine)) == [1, 2, 3, 4, 5]  # a ring of five
    for start in stored(mine):
        assert stored(copy)[start] == stored(mine)[start]
        assert stored(mine)[start][-1] == pytest.approx(0.9 ** (5 - start))


@pytest.mark.parametrize(("ahead", "groups"), [(0, 1), (1, 2)])
def test_they_reach_the_buffer_of_a_training(ahead: int, groups: int) -> None:
    with closing(make(2, num_envs=2)) as env:
        model = td3_bc(env, utd_ratio=0.5, gamma=GAMMA, ahead=ahead, groups=groups).learn(64)
        assert model.num_timesteps == 64
        chunks, inside = 64, model.replay_buffer.num_added - 64
        # One a chunk, but for the last one of each episode that is running
        assert chunks - 2 - 12 <= inside <= chunks
        assert model._n_updates <= 32  # gradient steps are counted by chunks
