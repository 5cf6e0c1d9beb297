"""The ring and its task index against plain lists; balanced draws; pickling; wrap-around."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from test_td3_buffer import make, push

from vla_gym.errors import ConfigError
from vla_gym_trainers.rollout.chunks import Piece
from vla_gym_trainers.td3.tensordicts import replay_tensordict


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
    shape = (1, 2)

    def step(tag: float, done: bool, limit: bool, pieces: int = 0) -> None:
        obs, after = (
            {"rl_token": np.full(shape, t, np.float32), "task_id": np.array([2])}
            for t in (tag, tag + 0.75)
        )
        info: dict[str, Any] = {"discount": 0.81, "TimeLimit.truncated": limit}
        if pieces:
            inside = [
                Piece({k: v[0] for k, v in after.items()}, float(k), 0.9) for k in range(pieces)
            ]
            info |= {"pieces": inside, "stride": 1}
        buffer.add(obs, after, np.full((1, 2, 7), tag), np.ones(1) * tag, np.array([done]), [info])

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
    assert found["next", "rl_token"][:, 0].tolist() == [1.75, 2.75, 3.75, 4.75]
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
