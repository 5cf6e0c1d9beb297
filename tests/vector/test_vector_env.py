"""The vector env's contract on cheap environments: Gymnasium's, then our own."""

import itertools
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from stub_envs import LIMIT, StubEnv, stub_factory
from vector_reference import (
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    assert_same,
    begin,
    by_mode,
    by_workers,
    copied,
    follow,
    follower,
)

from vla_gym import memory
from vla_gym.errors import ConfigError, NotEnoughMemoryError
from vla_gym.vector import LiberoVectorEnv

pytestmark = pytest.mark.usefixtures("nothing_stays")


# Spaces and types


@by_workers
def test_spaces_types_and_attributes(make_vec, workers):
    envs = make_vec(3, workers=workers, autoreset_mode="SameStep")
    single = StubEnv()
    assert isinstance(envs, VectorEnv) and envs.num_envs == 3
    assert envs.single_observation_space == single.observation_space
    assert envs.single_action_space == single.action_space
    assert envs.observation_space == batch_space(single.observation_space, 3)
    assert envs.action_space == batch_space(single.action_space, 3)
    assert envs.metadata["autoreset_mode"] is SAME_STEP
    assert envs.metadata["render_fps"] == 20 and envs.render_mode == "rgb_array"
    assert "autoreset_mode" not in StubEnv.metadata
    assert envs.worker_of.shape == (3,) and len(envs.worker_pids) == workers
    assert len(set(envs.worker_of.tolist())) == max(workers, 1)
    obs, infos = envs.reset(seed=0)
    assert obs in envs.observation_space
    assert {key: obs[key].dtype for key in obs} == {
        "image": np.uint8,
        "proprio": np.float32,
        "task_id": np.int64,
    }
    assert infos["executed_steps"].dtype == np.int64 and infos["success"].dtype == np.bool_
    obs, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
    assert obs in envs.observation_space
    assert (rewards.dtype, rewards.shape) == (np.float64, (3,))
    assert terminations.dtype == truncations.dtype == np.bool_


def test_default_is_one_worker_a_core_and_next_step(make_vec):
    import os

    envs = make_vec(2, workers=None)
    assert envs.autoreset_mode is NEXT_STEP and envs.metadata["autoreset_mode"] is NEXT_STEP
    assert len(envs.worker_pids) == min(2, len(os.sched_getaffinity(0)))


@by_workers
@by_mode
def test_equals_gymnasiums_sync_vector_env(make_vec, mode, workers):
    """Same observations, rewards, flags and infos, with infos of every kind, masks and dtypes."""
    kwargs = {"rich_info": True}
    ours = make_vec(4, stub_factory(**kwargs), workers=workers, autoreset_mode=mode)
    theirs = SyncVectorEnv(
        [partial(StubEnv, i, **kwargs) for i in range(4)], autoreset_mode=mode, copy=True
    )
    assert_same(ours.reset(seed=5), theirs.reset(seed=5), "reset")
    rng = np.random.default_rng(0)
    over = np.zeros(4, bool)
    for step in range(30):
        mask = over if mode == DISABLED else np.zeros(4, bool)
        if step % 7 == 3:  # also in the middle of episodes
            mask = mask | (rng.random(4) < 0.5)
        if mask.any():
            seeds = [100 + step, None, None, 200 + step] if step % 2 else None
            results = [
                envs.reset(seed=seeds, options={"reset_mask": mask.copy()})
                for envs in (ours, theirs)
            ]
            assert_same(*results, f"reset before step {step}")
        actions = rng.uniform(-1, 1, (4, 3)).astype(np.float32)
        mine, other = ours.step(actions), theirs.step(actions)
        over = mine[2] | mine[3]
        statistics = mine[4].pop("episode_stats", None), mine[4].pop("_episode_stats", None)
        assert (statistics[0] is not None) == over.any()
        assert_same(mine, other, f"step {step}")
    theirs.close()


def test_statistics_count_steps_without_executed_steps(make_vec):
    script = {"script": [(3, LIMIT)], "executed": None}
    envs = make_vec(1, stub_factory(**script), workers=0)
    envs.reset(seed=0)
    for _ in range(3):
        *_, infos = envs.step(np.zeros((1, 3), np.float32))
    assert infos["episode_stats"]["length"].tolist() == [3]
    assert infos["episode_stats"]["return"].tolist() == [1.5]
    assert infos["episode_stats"]["success"].tolist() == [False]
    dtypes = [infos["episode_stats"][key].dtype for key in ("return", "length", "success")]
    assert dtypes == [np.float64, np.int64, np.bool_]


# Copies and views


@by_workers
@by_mode
def test_copied_observations_are_the_callers_own(make_vec, mode, workers):
    envs = make_vec(3, workers=workers, autoreset_mode=mode)
    kept, copies = [envs.reset(seed=1)], []
    copies.append(copied(kept[0][0]))
    for _ in range(6):
        if mode == DISABLED:
            kept.append(envs.reset(options={"reset_mask": np.array([True, False, True])}))
        else:
            kept.append(envs.step(np.zeros((3, 3), np.float32)))
        copies.append(copied(kept[-1][0]))
    for result, copy in zip(kept, copies, strict=True):
        assert_same(result[0], copy)
    pairs = itertools.combinations([result[0]["image"] for result in kept], 2)
    assert not any(np.shares_memory(a, b) for a, b in pairs)
    kept[-1][0]["image"][:] = 0  # nobody else notices
    follow(envs, follower(3, 1, mode), 1, episodes=1)


@by_workers
def test_views_hold_until_the_next_but_one_step(make_vec, workers):
    envs = make_vec(3, stub_factory(script=[(9, LIMIT)]), workers=workers, copy=False)
    held = [envs.reset(seed=1)[0]]
    copies = [copied(held[0])]
    for _ in range(5):
        held.append(envs.step(np.ones((3, 3), np.float32))[0])
        copies.append(copied(held[-1]))
        assert_same(held[-2], copies[-2], "the last but one step's view")
    assert np.shares_memory(held[1]["image"], held[3]["image"]), "a view, not a copy"
    assert not np.array_equal(held[1]["image"], copies[1]["image"]), "the third step writes there"


# Resets


@by_workers
def test_seeds_and_following_episodes(make_vec, workers):
    envs = make_vec(3, workers=workers)

    def played(**kwargs):
        return envs.reset(**kwargs)[0]["proprio"][:, :2].tolist()

    assert played(seed=7) == [[7, 0], [8, 0], [9, 0]]
    assert played() == [[7, 1], [8, 1], [9, 1]]
    assert played(seed=[3, None, 5]) == [[3, 0], [8, 2], [5, 0]]
    mask = np.array([False, True, True])
    assert played(seed=40, options={"reset_mask": mask}) == [[3, 0], [41, 0], [42, 0]]
    assert played() == [[3, 1], [41, 1], [42, 1]]
    assert played(seed=7) == [[7, 0], [8, 0], [9, 0]]


def test_without_a_seed_envs_differ_and_go_on(make_vec):
    envs = make_vec(3, workers=0)
    assert (envs.reset()[0]["proprio"][:, 1] == 0).all()
    seeds = envs.get_attr("_seed_value")
    assert len(set(seeds)) == 3
    assert (envs.reset()[0]["proprio"][:, 1] == 1).all()
    assert envs.get_attr("_seed_value") == seeds


@by_workers
def test_options_reach_the_envs_for_one_episode(make_vec, workers):
    envs = make_vec(3, stub_factory(script=[(1, LIMIT)]), workers=workers)
    options = {"task_id": 4, "init_state_id": 7}
    obs, infos = envs.reset(seed=10, options=options)
    assert obs["task_id"].tolist() == infos["task_id"].tolist() == [4, 4, 4]
    assert infos["init_state_id"].tolist() == [7, 7, 7]
    assert options == {"task_id": 4, "init_state_id": 7}
    actions = np.zeros((3, 3), np.float32)
    envs.step(actions)
    *_, infos = envs.step(actions)
    assert infos["task_id"].tolist() == [(10 + i + 1) % 5 for i in range(3)]
    assert infos["init_state_id"].tolist() == [-1, -1, -1]
    obs, infos = envs.reset(options={"task_id": 3, "reset_mask": np.array([False, True, False])})
    assert infos["_task_id"].tolist() == [False, True, False] and obs["task_id"][1] == 3
    assert infos["instruction"].tolist() == [None, "do task 3", None]


@pytest.mark.parametrize(
    "options",
    [
        {"reset_mask": np.zeros(3, bool)},
        {"reset_mask": np.ones(2, bool)},
        {"reset_mask": np.ones(3, np.int64)},
    ],
)
def test_wrong_reset_options_change_nothing(make_vec, options):
    envs = make_vec(3, workers=0)
    expected = begin(envs, 2)
    with pytest.raises((ConfigError, TypeError)):
        envs.reset(seed=90, options=options)
    expected.check_step(envs.step(expected.actions()))
    expected.check_reset(envs.reset(), first=False)


def test_seeds_that_tear_a_group_apart_are_refused(make_vec):
    envs = make_vec(4, workers=0, group_size=2)
    one = {"reset_mask": np.array([True, False, False, False])}
    envs.reset(seed=10, options=one)  # the first reset: all get seeds
    for seed, options in [
        (20, one),
        ([20, None, None, None], {}),
        ([20, 20, 30, 31], {}),
        ([20, 21, 30, None], {}),
    ]:
        with pytest.raises(ConfigError, match="all environments of a group"):
            envs.reset(seed=seed, options=options)
    envs.reset(seed=20, options={"reset_mask": np.array([True, True, False, False])})
    envs.reset(seed=[20, 21, None, None])


@pytest.mark.parametrize("seed", ["ab", -1, [0.5, 1], [2**200, 1], True, [1], 1j], ids=repr)
def test_a_bad_seed_is_refused(make_vec, seed):
    envs = make_vec(2, workers=0)
    with pytest.raises(ConfigError, match="seed"):
        envs.reset(seed=seed)
    envs.reset(seed=3)


def test_a_table_that_does_not_fit_is_refused_with_both_sizes(make_vec, monkeypatch):
    monkeypatch.setattr(memory, "free_ram", lambda: 100)
    with pytest.raises(NotEnoughMemoryError, match="2 environments takes about .* free"):
        make_vec(2, workers=0)


def test_windows_are_refused():
    with pytest.raises(ConfigError, match=r"render_mode must be one of None, 'rgb_array'"):
        LiberoVectorEnv(3, "goal", workers=0, render_mode="human")
