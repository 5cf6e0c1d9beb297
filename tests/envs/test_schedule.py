"""TaskSchedule: which task and layout each episode of each environment has."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import get_args

import numpy as np
import pytest

from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.schedule import TaskSampling, TaskSchedule
from vla_gym.errors import ConfigError, UnknownTaskError

TASK_SAMPLINGS = get_args(TaskSampling)
LISTS = [[4], [7, 8], [0, 3, 5, 7, 9], list(range(10))]


def tasks(schedule: TaskSchedule, base: int, episodes: int) -> list[int]:
    """Play as environment ``env_index`` of a vector env that is seeded with ``base``."""
    seed = base + schedule.env_index
    return [schedule.task_and_rng(seed, episode)[0] for episode in range(episodes)]


def first_draws(schedule: TaskSchedule, base: int, episode: int) -> tuple[int, list[float]]:
    _, key_seed, rng = schedule.task_and_rng(base + schedule.env_index, episode)
    return key_seed, rng.random(3).tolist()


@pytest.mark.parametrize("task_ids", LISTS)
def test_the_default_is_one_uniform_draw_from_seed_and_episode(task_ids) -> None:
    schedule = TaskSchedule(task_ids)
    for seed in (0, 7, 12_345):
        for episode in range(30):
            rng = np.random.default_rng([seed, episode])
            expected = task_ids[int(rng.integers(len(task_ids)))]
            task_id, key_seed, given = schedule.task_and_rng(seed, episode)
            assert (task_id, key_seed) == (expected, seed)
            assert given.random() == rng.random()


def test_without_groups_the_number_of_the_environment_does_not_change_uniform_draws() -> None:
    first, other = TaskSchedule([1, 2, 3]), TaskSchedule([1, 2, 3], env_index=5)
    assert tasks(first, 20, 50) == [other.task_and_rng(20, e)[0] for e in range(50)]


@pytest.mark.parametrize("sampling", ["round_robin", "balanced"])
@pytest.mark.parametrize("task_ids", LISTS)
@pytest.mark.parametrize("group_size", [1, 3])
def test_each_task_once_a_block_and_even_over_the_environments(
    sampling, task_ids, group_size
) -> None:
    groups, count = 7, len(task_ids)
    for base in (0, 100, 9_999):
        played = [
            tasks(TaskSchedule(task_ids, sampling, index, group_size), base, 4 * count)
            for index in range(groups * group_size)
        ]
        for row in played:
            for start in range(0, 4 * count, count):
                assert sorted(row[start : start + count]) == sorted(task_ids)
        for now in zip(*played, strict=True):
            counts = Counter({task_id: 0 for task_id in task_ids})
            counts.update(now[::group_size])
            assert max(counts.values()) - min(counts.values()) <= 1


def test_round_robin_is_the_list_in_its_order() -> None:
    assert tasks(TaskSchedule([5, 3, 8], "round_robin"), 0, 7) == [5, 3, 8, 5, 3, 8, 5]
    assert tasks(TaskSchedule([5, 3, 8], "round_robin", env_index=1), 0, 4) == [3, 8, 5, 3]


def test_balanced_shuffles_anew_in_each_block_and_for_each_base_seed() -> None:
    schedule = TaskSchedule(range(10), "balanced")
    blocks = {tuple(tasks(schedule, 0, 50)[start : start + 10]) for start in range(0, 50, 10)}
    assert len(blocks) == 5
    assert tasks(schedule, 0, 10) != tasks(schedule, 1, 10)


@pytest.mark.parametrize("sampling", TASK_SAMPLINGS)
def test_groups_share_tasks_and_layouts_and_differ_from_each_other(sampling) -> None:
    group_size, base = 4, 1_000
    envs = [TaskSchedule(range(10), sampling, i, group_size) for i in range(12)]
    draws = [[first_draws(env, base, e) for e in range(20)] for env in envs]
    for index in range(12):
        leader = index - index % group_size
        assert tasks(envs[index], base, 20) == tasks(envs[leader], base, 20)
        assert draws[index] == draws[leader]
    assert draws[0] != draws[4] and draws[4] != draws[8]


def test_layouts_do_not_depend_on_the_sampling() -> None:
    for index in (0, 5):
        draws = [
            [first_draws(TaskSchedule(range(10), mode, index, 2), 40, e) for e in range(12)]
            for mode in TASK_SAMPLINGS
        ]
        assert draws[0] == draws[1] == draws[2]


def test_a_task_that_is_listed_twice_is_played_twice_as_often() -> None:
    assert Counter(tasks(TaskSchedule([7, 7, 2], "balanced"), 3, 9)) == {7: 6, 2: 3}
    drawn = Counter(tasks(TaskSchedule([7, 7, 2]), 3, 3_000))
    assert drawn[7] == pytest.approx(2_000, abs=100)


def test_weights_say_how_often_a_task_is_drawn_and_change_no_layout() -> None:
    plain, weighted = TaskSchedule([7, 2, 4, 5]), TaskSchedule([7, 2, 4, 5])
    weighted.set_weights({7: 0.5, 4: 0.0, 9: 3.0})
    drawn = Counter(tasks(weighted, 3, 5_000))
    # 0.5, 1 and 1 of 2.5; within five standard deviations
    assert drawn[7] == pytest.approx(1_000, abs=145)
    assert drawn[2] == pytest.approx(2_000, abs=175) and drawn[4] == 0
    assert [first_draws(weighted, 3, e) for e in range(9)] == [
        first_draws(plain, 3, e) for e in range(9)
    ]
    weighted.set_weights({})
    assert tasks(weighted, 3, 50) == tasks(plain, 3, 50)


def test_a_group_shares_what_weights_draw_and_other_environments_have_them() -> None:
    first = TaskSchedule(range(10), group_size=2)
    first.set_weights({t: t / 10 for t in range(10)})
    row = [[first.task_and_rng(50 + i, e, i)[0] for e in range(30)] for i in range(4)]
    assert row[0] == row[1] and row[2] == row[3] and row[0] != row[2]
    assert tasks(pickle.loads(pickle.dumps(first)), 50, 30) == row[0]


@pytest.mark.parametrize(
    ("sampling", "weights", "text"),
    [
        ("uniform", {1: -0.1}, r"weight must be in \[0, 1e\+09\]"),
        ("uniform", {1: float("nan")}, "weight must be in"),
        ("uniform", {1: "much"}, "weight must be in"),
        ("uniform", {"bowl": 1.0}, "task_id must be"),
        ("uniform", [0.1, 0.9], "Expected weights by task id"),
        ("uniform", {1: 0.0, 2: 0.0}, "not all be 0: give one of them"),
        ("balanced", {}, "'balanced' draw none"),
    ],
)
def test_weights_that_cannot_be_are_refused(sampling, weights, text) -> None:
    with pytest.raises(ConfigError, match=text):
        TaskSchedule([1, 2], sampling).set_weights(weights)


def test_weights_hold_for_an_environment_that_plays_as_another() -> None:
    env = LiberoEnv("goal", cameras=(), task_ids=[2, 7, 8])
    env.reset(seed=5)
    env.seek(9, 4, env_index=3)
    env.set_task_weights({2: 0.0, 7: 0.0})
    with pytest.raises(UnknownTaskError, match="task_id 99 is out of range"):
        env.set_task_weights({99: 2.0})
    assert [env.reset()[1]["task_id"] for _ in range(4)] == [8] * 4
    env.close()


def test_pickles_and_other_environments() -> None:
    schedule = TaskSchedule(range(5), "balanced", 3, 2)
    copy = pickle.loads(pickle.dumps(schedule))
    assert tasks(copy, 8, 20) == tasks(schedule, 8, 20)
    other = TaskSchedule(range(5), "balanced", 9, 2)
    assert [schedule.task_and_rng(59, e, 9)[0] for e in range(20)] == tasks(other, 50, 20)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"task_ids": []}, "number of task_ids"),
        ({"task_ids": [-1]}, "task_id must be at least 0"),
        ({"sampling": "random"}, "'uniform', 'round_robin', 'balanced'"),
        ({"env_index": -1}, "env_index must be at least 0"),
        ({"env_index": 1.0}, "env_index must be an integer"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"group_size": True}, "group_size must be an integer"),
    ],
)
def test_wrong_arguments(kwargs, text) -> None:
    with pytest.raises(ConfigError, match=text):
        TaskSchedule(**{"task_ids": [0], **kwargs})


def test_seeds_that_no_vector_env_gives() -> None:
    with pytest.raises(ConfigError, match="at least 2, got 1"):
        TaskSchedule([0], env_index=6, group_size=4).check(1, 0)
    with pytest.raises(ConfigError, match="at least 6, got 5"):
        TaskSchedule([0], "balanced", env_index=6).check(5, 0)
    assert TaskSchedule([0], env_index=6).check(0, 0) == (0, 0, 6)


@pytest.mark.parametrize(
    ("sampling", "init_states"),
    [("uniform", "official"), ("round_robin", "sampled"), ("balanced", "sampled")],
)
def test_environments_play_their_schedule(sampling, init_states) -> None:
    task_ids, base, group_size = [2, 7, 8], 10, 2
    played = []
    for index in range(4):
        env = LiberoEnv(
            "goal",
            task_ids=task_ids,
            task_sampling=sampling,
            env_index=index,
            group_size=group_size,
            init_states=init_states,
            cameras=(),
        )
        rows = []
        for episode in range(4):
            obs, info = env.reset(seed=base + index if episode == 0 else None)
            rows.append((info["task_id"], info["init_state_id"], env.sim.qpos.tolist()))
            assert obs["task_id"] == info["task_id"]
        assert [row[0] for row in rows] == tasks(env.schedule, base, 4)
        if init_states == "official":
            leader = base + index - index % group_size
            assert [row[1] for row in rows] == [(leader + e) % 50 for e in range(4)]
        played.append(rows)
        env.close()
    assert played[0] == played[1] and played[2] == played[3]
    assert played[0] != played[2]
