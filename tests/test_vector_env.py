"""The vector env's contract on cheap environments: Gymnasium's, then our own."""

from __future__ import annotations

import gc
import itertools
import pickle
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from stub_envs import LIMIT, SUCCESS, Fault, Gate, StubEnv, stub_action, stub_factory, stub_image
from vector_processes import wait_until
from vector_reference import (
    DISABLED,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    Follower,
    Reference,
    assert_same,
    check_cells,
    copied,
    follow,
    info_row,
    rows,
)

from vla_gym.errors import ConfigError, InvalidActionError, UnknownTaskError, VlaGymError
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vector.process_server import ProcessServer

by_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
#: In this process; with workers, all envs in one; each env its own.
by_workers = pytest.mark.parametrize("workers", [0, 1, 3])


@pytest.fixture(scope="module", autouse=True)
def warm_server():
    """Keep one server for all tests of this file: starting it takes longer than most of them."""
    server = ProcessServer.acquire()
    yield server
    gc.collect()
    server.release()


@pytest.fixture
def make_vec():
    """Make stub vector envs that are closed after the test."""
    made = []

    def make(num_envs=3, factory=None, **kwargs):
        envs = LiberoVectorEnv(num_envs, env_factory=factory or stub_factory(), **kwargs)
        made.append(envs)
        return envs

    yield make
    for envs in made:
        envs.close()


def follower(num_envs: int, seed: int, mode: AutoresetMode, **kwargs) -> Follower:
    references = [
        Reference(StubEnv(i, **kwargs), seed + i, partial(stub_action, seed + i))
        for i in range(num_envs)
    ]
    return Follower(references, mode)


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

    envs = make_vec(2)
    assert envs.autoreset_mode is NEXT_STEP and envs.metadata["autoreset_mode"] is NEXT_STEP
    assert len(envs.worker_pids) == min(2, len(os.sched_getaffinity(0)))


def test_gym_make_vec_builds_it():
    envs = gym.make_vec(
        "Libero-goal-v0",
        num_envs=2,
        workers=0,
        cameras=(),
        task_ids=[7, 8],
        chunk_len=2,
        autoreset_mode="SAME_STEP",
    )
    try:
        assert isinstance(envs.unwrapped, LiberoVectorEnv)
        assert envs.metadata["autoreset_mode"] is SAME_STEP
        assert {task.task_id for task in envs.unwrapped.tasks_of(1)} == {7, 8}
        assert envs.action_space.shape == (2, 2, 7)
    finally:
        envs.close()


# Autoreset, to the letter: a table written by hand

SCRIPTS = {
    0: {"script": [(2, SUCCESS), (3, LIMIT)]},
    1: {"script": [(3, LIMIT), (1, SUCCESS)]},
    2: {"script": [(1, SUCCESS), (4, LIMIT)]},
}
# A list is a step, see check_cells; a tuple is a reset: which envs, and all observations after it.
TABLES = {
    NEXT_STEP: [
        ["0.1 0.25 - step", "0.1 0.25 - step", "0.1 1.25 T step =1.25/4/1"],
        ["0.2 1.5 T step =1.75/8/1", "0.2 0.5 - step", "1.0 0 - reset"],
        ["1.0 0 - reset", "0.3 0.75 C step =1.5/12/0", "1.1 0.25 - step"],
        ["1.1 0.25 - step", "1.0 0 - reset", "1.2 0.5 - step"],
        ["1.2 0.5 - step", "1.1 1.25 T step =1.25/4/1", "1.3 0.75 - step"],
        ["1.3 0.75 C step =1.5/12/0", "2.0 0 - reset", "1.4 1.0 C step =2.5/16/0"],
        ["2.0 0 - reset", "2.1 1.25 T step =1.25/4/1", "2.0 0 - reset"],
        # A masked reset in the middle of an episode, and of one whose reset was due.
        ([0, 1], "3.0 3.0 2.0"),
        ["3.1 0.25 - step", "3.1 1.25 T step =1.25/4/1", "2.1 0.25 - step"],
        ["3.2 0.5 - step", "4.0 0 - reset", "2.2 0.5 - step"],
    ],
    SAME_STEP: [
        ["0.1 0.25 - step", "0.1 0.25 - step", "1.0 1.25 T reset <0.1 =1.25/4/1"],
        ["1.0 1.5 T reset <0.2 =1.75/8/1", "0.2 0.5 - step", "1.1 0.25 - step"],
        ["1.1 0.25 - step", "1.0 0.75 C reset <0.3 =1.5/12/0", "1.2 0.5 - step"],
        ["1.2 0.5 - step", "2.0 1.25 T reset <1.1 =1.25/4/1", "1.3 0.75 - step"],
        [
            "2.0 0.75 C reset <1.3 =1.5/12/0",
            "3.0 1.25 T reset <2.1 =1.25/4/1",
            "2.0 1.0 C reset <1.4 =2.5/16/0",
        ],
        ["2.1 0.25 - step", "4.0 1.25 T reset <3.1 =1.25/4/1", "2.1 0.25 - step"],
        ([0], "3.0 4.0 2.1"),
        ["3.1 0.25 - step", "5.0 1.25 T reset <4.1 =1.25/4/1", "2.2 0.5 - step"],
    ],
    DISABLED: [
        ["0.1 0.25 - step", "0.1 0.25 - step", "0.1 1.25 T step =1.25/4/1"],
        ([2], "0.1 0.1 1.0"),
        ["0.2 1.5 T step =1.75/8/1", "0.2 0.5 - step", "1.1 0.25 - step"],
        ([0], "1.0 0.2 1.1"),
        ["1.1 0.25 - step", "0.3 0.75 C step =1.5/12/0", "1.2 0.5 - step"],
        ([1, 2], "1.1 1.0 2.0"),
        ["1.2 0.5 - step", "1.1 1.25 T step =1.25/4/1", "2.1 0.25 - step"],
        ([1], "1.2 2.0 2.1"),
        ["1.3 0.75 C step =1.5/12/0", "2.1 1.25 T step =1.25/4/1", "2.2 0.5 - step"],
    ],
}


@by_workers
@by_mode
def test_table_of_every_flag(make_vec, mode, workers):
    envs = make_vec(3, stub_factory(SCRIPTS, rich_info=True), workers=workers, autoreset_mode=mode)
    obs, infos = envs.reset(seed=20)
    assert obs["proprio"][:, :3].tolist() == [[20, 0, 0], [21, 0, 0], [22, 0, 0]]
    assert infos["_fresh"].all() and "_pose" not in infos and "_episode_stats" not in infos
    actions = np.zeros((3, 3), np.float32)
    for cells in TABLES[mode]:
        if isinstance(cells, list):
            check_cells(envs.step(actions), cells, stub_image)
            continue
        mask = np.isin(np.arange(3), cells[0])
        obs, infos = envs.reset(options={"reset_mask": mask})
        sources = [f"{row[1]:.0f}.{row[2]:.0f}" for row in obs["proprio"]]
        assert " ".join(sources) == cells[1]
        assert infos["_fresh"].tolist() == infos["_task_id"].tolist() == mask.tolist()
        assert "_pose" not in infos and "_episode_stats" not in infos


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


@by_workers
@by_mode
def test_equals_single_envs_with_statistics(make_vec, mode, workers):
    envs = make_vec(4, workers=workers, autoreset_mode=mode)
    follow(envs, follower(4, 30, mode), 30, episodes=5)


def test_statistics_count_steps_without_executed_steps(make_vec):
    script = {"script": [(3, LIMIT)], "executed": None}
    envs = make_vec(1, stub_factory(**script), workers=1)
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


@by_mode
def test_views_hold_the_same_values(make_vec, mode):
    envs = make_vec(4, workers=2, autoreset_mode=mode, copy=False)
    follow(envs, follower(4, 8, mode), 8, episodes=3)


def test_views_survive_close(make_vec):
    envs = make_vec(2, workers=1, copy=False)
    obs, _ = envs.reset(seed=1)
    before = copied(obs)
    envs.close()
    assert_same(obs, before)


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
    envs = make_vec(3, workers=2)
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
    envs = make_vec(3, workers=1)
    expected = follower(3, 2, NEXT_STEP)
    expected.check_reset(envs.reset(seed=2))
    with pytest.raises((ConfigError, TypeError)):
        envs.reset(seed=90, options=options)
    expected.check_step(envs.step(expected.actions()))
    expected.check_reset(envs.reset(), first=False)


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3, 4], -1, "0", 1.5])
def test_wrong_seeds(make_vec, seed):
    envs = make_vec(3, workers=1)
    with pytest.raises((ConfigError, ValueError, TypeError, gym.error.Error)):
        envs.reset(seed=seed)
    follow(envs, follower(3, 6, NEXT_STEP), 6, episodes=1)


# Misuse


@by_workers
def test_disabled_refuses_to_step_an_ended_env(make_vec, workers):
    envs = make_vec(3, stub_factory(SCRIPTS), workers=workers, autoreset_mode=DISABLED)
    expected = follower(3, 4, DISABLED)
    for i, reference in enumerate(expected.references):
        reference.env = StubEnv(i, **SCRIPTS[i])
    expected.check_reset(envs.reset(seed=4))
    expected.check_step(envs.step(expected.actions()))
    with pytest.raises((gym.error.ResetNeeded, VlaGymError), match="2"):
        envs.step(np.zeros((3, 3), np.float32))
    mask = np.array(expected.due)
    expected.check_masked_reset(envs.reset(options={"reset_mask": mask}), mask)
    expected.check_step(envs.step(expected.actions()))


@by_workers
def test_bad_actions_are_refused_before_anything_moves(make_vec, workers):
    envs = make_vec(3, workers=workers)
    expected = follower(3, 4, NEXT_STEP)
    with pytest.raises(gym.error.ResetNeeded):
        envs.step(np.zeros((3, 3), np.float32))
    expected.check_reset(envs.reset(seed=4))
    bad = np.zeros((3, 3), np.float32)
    bad[1, 2] = np.nan
    for actions in (np.zeros((2, 3)), np.zeros((3, 4)), np.zeros(9), bad, [["a"] * 3] * 3):
        with pytest.raises(InvalidActionError):
            envs.step(actions)
    expected.check_step(envs.step(expected.actions()))


def test_calls_in_the_wrong_order(make_vec):
    envs = make_vec(2, stub_factory(script=[(9, LIMIT)]), workers=1)
    expected = follower(2, 0, NEXT_STEP, script=[(9, LIMIT)])
    expected.check_reset(envs.reset(seed=0))
    with pytest.raises(gym.error.NoAsyncCallError):
        envs.step_wait()
    envs.step_async(expected.actions())
    for method in (
        partial(envs.step_async, expected.actions()),
        partial(envs.step, expected.actions()),
        envs.reset,
        envs.get_state,
        envs.render,
        partial(envs.send, expected.actions(), [0, 1]),
        envs.recv,
    ):
        with pytest.raises(gym.error.AlreadyPendingCallError):
            method()
    expected.check_step(envs.step_wait())
    envs.send(expected.actions([1]), [1])
    for method in (partial(envs.step, expected.actions()), envs.reset, envs.get_state):
        with pytest.raises(gym.error.AlreadyPendingCallError):
            method()
    with pytest.raises(gym.error.AlreadyPendingCallError):
        envs.send(expected.actions([1]), [1])
    for ids in ([2], [-1], [0, 0], []):
        with pytest.raises(ConfigError):
            envs.send(np.zeros((len(ids), 3), np.float32), ids)
    expected.check_step(envs.recv(), ids=[1])
    with pytest.raises(ConfigError):
        envs.recv()
    expected.check_step(envs.step(expected.actions()))
    envs.close()
    for method in (partial(envs.step, expected.actions()), envs.reset, envs.render):
        with pytest.raises(gym.error.ClosedEnvironmentError):
            method()
    envs.close()  # twice is fine


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"num_envs": 0, "suite": "goal"}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "workers": -1}, ConfigError),
        ({"num_envs": 2, "suite": "gaol"}, UnknownTaskError),
        ({"num_envs": 2, "suite": "goal", "task_ids": 10}, UnknownTaskError),
        ({"num_envs": 2, "suite": "goal", "task_ids": [[1], [2], [3]]}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "task_ids": [[1], []]}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "task_sampling": "often"}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "group_size": 0}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "autoreset_mode": "LATER"}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "on_worker_failure": "ignore"}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "max_restarts": -1}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "step_timeout": 0}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "chunk_len": 0}, ConfigError),
        ({"num_envs": 2, "suite": "goal", "colour": "red"}, (ConfigError, TypeError)),
        ({"num_envs": 2}, ConfigError),
        ({"num_envs": 2, "env_factory": stub_factory(), "chunk_len": 8}, ConfigError),
    ],
)
def test_wrong_arguments_give_one_clear_error(kwargs, error):
    with pytest.raises(error):
        LiberoVectorEnv(**kwargs)


def test_envs_must_share_their_spaces():
    def factory(index):
        env = StubEnv(index)
        if index == 2:
            env.action_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        return env

    for workers in (0, 2):
        with pytest.raises(ConfigError, match="2"):
            LiberoVectorEnv(3, env_factory=factory, workers=workers)


# Sending and receiving


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=lambda mode: mode.name)
def test_send_and_recv_give_the_episodes_of_step(make_vec, mode, workers):
    envs = make_vec(4, workers=workers, autoreset_mode=mode)
    expected = follower(4, 50, mode)
    envs.reset_send(seed=50)
    obs, rewards, terminations, truncations, infos = envs.recv()
    assert infos.pop("env_id").tolist() == [0, 1, 2, 3]
    assert not (rewards.any() or terminations.any() or truncations.any())
    expected.check_reset((obs, infos))
    rng = np.random.default_rng(workers)
    idle, going = {0, 1, 2, 3}, set()
    while min(expected.finished) < 3:
        chosen = sorted(i for i in idle if rng.random() < 0.7) or sorted(idle)[:1]
        if chosen:
            order = [0, 2, 1, 3] if len(chosen) == 4 else rng.permutation(chosen).tolist()
            envs.send(expected.actions(order), order)
            idle -= set(chosen)
            going |= set(chosen)
        wanted = None if rng.random() < 0.3 else int(rng.integers(1, len(going) + 1))
        result = envs.recv(wanted)
        ids = result[4]["env_id"].tolist()
        assert len(ids) == (len(going) if wanted is None else wanted)
        assert ids == sorted(ids) and set(ids) <= going
        expected.check_step(result, ids=ids)
        idle |= set(ids)
        going -= set(ids)


def test_recv_returns_the_fast_ones_while_a_slow_one_works(make_vec, tmp_path):
    gate = Gate(str(tmp_path / "open"))
    script = {"script": [(30, LIMIT)]}
    factory = stub_factory({2: {"gates": [gate]}}, **script)
    envs = make_vec(3, factory, workers=3)
    expected = follower(3, 0, NEXT_STEP, **script)
    expected.check_reset(envs.reset(seed=0))
    envs.send(expected.actions(), [0, 1, 2])
    expected.check_step(envs.recv(min_envs=2), ids=[0, 1])
    for _ in range(5):
        envs.send(expected.actions([0, 1]), [0, 1])
        expected.check_step(envs.recv(min_envs=2), ids=[0, 1])
    with pytest.raises(TimeoutError):
        envs.recv(timeout=0.05)
    (tmp_path / "open").touch()
    expected.check_step(envs.recv(), ids=[2])
    expected.check_step(envs.step(expected.actions()))


def test_step_wait_may_be_asked_again_after_a_timeout(make_vec, tmp_path):
    gate = Gate(str(tmp_path / "open"))
    script = {"script": [(30, LIMIT)]}
    envs = make_vec(2, stub_factory({1: {"gates": [gate]}}, **script), workers=2)
    expected = follower(2, 0, NEXT_STEP, **script)
    expected.check_reset(envs.reset(seed=0))
    envs.step_async(expected.actions())
    with pytest.raises(TimeoutError):
        envs.step_wait(timeout=0.05)
    (tmp_path / "open").touch()
    expected.check_step(envs.step_wait())
    expected.check_step(envs.step(expected.actions()))


def test_a_masked_reset_and_a_step_may_be_sent_together(make_vec):
    envs = make_vec(4, workers=2, autoreset_mode=DISABLED)
    expected = follower(4, 9, DISABLED)
    expected.check_reset(envs.reset(seed=9))
    for _ in range(12):
        due = np.flatnonzero(expected.due).tolist()
        ready = sorted(set(range(4)) - set(due))
        if ready:
            envs.send(expected.actions(ready), ready)
        if due:
            envs.reset_send(due)
        obs, rewards, terminations, truncations, infos = envs.recv()
        assert infos["env_id"].tolist() == [0, 1, 2, 3]
        for i in due:
            record, info = expected.expect_reset(i)
            assert_same(rows(obs, i), record.obs)
            assert (rewards[i], terminations[i], truncations[i]) == (0.0, False, False)
            found = info_row(infos, i)
            found.pop("env_id", None)
            assert_same(found, info)
        stepped = (
            {key: value[ready] for key, value in obs.items()},
            rewards[ready],
            terminations[ready],
            truncations[ready],
            _select(infos, ready),
        )
        if ready:
            expected.check_step(stepped, ids=ready)


def _select(infos, ids):
    """Some rows of infos; keys that none of them has are left out, as in Gymnasium."""
    picked = {}
    for key, value in infos.items():
        if key.startswith("_") or (f"_{key}" in infos and not infos[f"_{key}"][ids].any()):
            continue
        picked[key] = _select(value, ids) if isinstance(value, dict) else value[ids]
        if f"_{key}" in infos:
            picked[f"_{key}"] = infos[f"_{key}"][ids]
    return picked


@pytest.mark.parametrize(("num_envs", "workers", "k"), [(4, 2, 2), (6, 3, 2), (8, 2, 4), (3, 3, 3)])
def test_groups_spread_over_the_workers(make_vec, num_envs, workers, k):
    envs = make_vec(num_envs, workers=workers)
    groups = envs.groups(k)
    assert len(groups) == k and sorted(np.concatenate(groups).tolist()) == list(range(num_envs))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    if num_envs // workers >= k:
        for group in groups:
            loads = np.bincount(envs.worker_of[group], minlength=workers)
            assert loads.max() - loads.min() <= 1, f"{group} on workers {envs.worker_of[group]}"
    for wrong in (0, num_envs + 1):
        with pytest.raises(ConfigError):
            envs.groups(wrong)


# Calls, states, wrappers


@by_workers
def test_call_get_attr_set_attr_and_render(make_vec, workers):
    envs = make_vec(3, workers=workers)
    obs, _ = envs.reset(seed=0)
    assert envs.call("add", 5, b=1) == (6, 106, 206)
    assert envs.get_attr("knob") == (0, 1, 2)
    envs.set_attr("knob", "same")
    assert envs.get_attr("knob") == ("same",) * 3
    envs.set_attr("knob", [7, 8, 9])
    assert envs.get_attr("knob") == (7, 8, 9)
    with pytest.raises(ValueError):
        envs.set_attr("knob", [1, 2])
    assert_same(envs.render(), tuple(obs["image"]))
    pids = envs.call("pid")
    assert set(pids) == set(envs.worker_pids) if workers else len(set(pids)) == 1
    before = envs.worker_pids
    with pytest.raises(KeyError, match="stub call"):
        envs.call("fail")
    with pytest.raises(AttributeError, match="no_such_thing"):
        envs.get_attr("no_such_thing")
    assert envs.worker_pids == before, "an exception in a call must not restart anything"
    follow(envs, follower(3, 3, NEXT_STEP), 3, episodes=1)


@by_workers
@by_mode
def test_states_move_between_envs_and_bring_their_future(make_vec, mode, workers):
    script = {"script": [(4, LIMIT), (2, SUCCESS), (3, LIMIT)]}
    envs = make_vec(3, stub_factory(**script), workers=workers, autoreset_mode=mode)
    expected = follower(3, 60, mode, **script)
    expected.check_reset(envs.reset(seed=60))
    for _ in range(2):
        expected.check_step(envs.step(expected.actions()))
    states = pickle.loads(pickle.dumps(envs.get_state()))
    assert len(states) == 3 and len(envs.get_state([2])) == 1
    marks = expected.episode[0], expected.count[0], expected.last[0]
    for _ in range(2):
        expected.check_step(envs.step(expected.actions()))
    # Env 1 goes on as env 0 was; the others stay where they are.
    obs = envs.set_state([states[0]], [1])
    expected.references[1] = expected.references[0]
    expected.episode[1], expected.count[1], expected.last[1] = marks
    expected.due[1] = False
    for i in range(3):
        assert_same(rows(obs, i), expected.last[i], f"env {i} after set_state")
    for _ in range(10):
        if mode == DISABLED and any(expected.due):
            mask = np.array(expected.due)
            expected.check_masked_reset(envs.reset(options={"reset_mask": mask}), mask)
        expected.check_step(envs.step(expected.actions()))
    with pytest.raises(ConfigError):
        envs.set_state(states, [0])


def test_a_state_of_an_ended_episode_is_ended(make_vec):
    script = {"script": [(1, LIMIT), (2, LIMIT)]}
    envs = make_vec(1, stub_factory(**script), workers=1)
    expected = follower(1, 0, NEXT_STEP, **script)
    expected.check_reset(envs.reset(seed=0))
    expected.check_step(envs.step(expected.actions()))
    state = envs.get_state()
    for _ in range(2):
        expected.check_step(envs.step(expected.actions()))
    envs.set_state(state)
    expected.episode, expected.count, expected.due = [0], [1], [True]
    for _ in range(4):
        expected.check_step(envs.step(expected.actions()))


@pytest.mark.parametrize("workers", [0, 2])
def test_wrappers_travel_to_the_workers(make_vec, workers):
    bonus = 10.0  # a closure: only cloudpickle can carry it

    class Shout(gym.Wrapper):
        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            return obs, {**info, "shout": info["instruction"].upper()}

    envs = make_vec(
        2,
        workers=workers,
        env_wrappers=[
            lambda env: gym.wrappers.TransformReward(env, lambda r: r + bonus),
            Shout,
        ],
    )
    _, infos = envs.reset(seed=0)
    assert infos["shout"].tolist() == ["DO TASK 0", "DO TASK 1"]
    _, rewards, *_ = envs.step(np.zeros((2, 3), np.float32))
    assert (rewards >= 10.25).all()


@by_workers
@pytest.mark.parametrize("at", ["step", "reset"])
def test_errors_of_the_package_are_raised_and_restart_nothing(
    make_vec, tmp_path, recwarn, workers, at
):
    """E.g. an InvalidActionError of a wrapper is the caller's mistake, not the worker's."""
    fault = Fault("error", at, episode=1, step=1, flag=str(tmp_path / "once"))
    script = {"script": [(2, LIMIT)]}
    envs = make_vec(3, stub_factory({1: {"faults": [fault]}}, **script), workers=workers)
    pids = envs.worker_pids
    expected = follower(3, 0, NEXT_STEP, **script)
    expected.check_reset(envs.reset(seed=0))
    with pytest.raises(ConfigError, match=f"stub error in {at}"):
        for _ in range(4):
            expected.check_step(envs.step(expected.actions()))
    assert envs.worker_pids == pids and not recwarn.list
    follow(envs, follower(3, 70, NEXT_STEP, **script), 70, episodes=2)


def test_waiting_is_needed(make_vec, tmp_path):
    """The gate really holds a step: otherwise the tests that use it would prove nothing."""
    gate = Gate(str(tmp_path / "open"))
    envs = make_vec(1, stub_factory(gates=[gate]), workers=1)
    envs.reset(seed=0)
    envs.step_async(np.zeros((1, 3), np.float32))
    wait_until((tmp_path / "open.entered").exists, "the step")
    with pytest.raises(TimeoutError):
        envs.step_wait(timeout=0.2)
    (tmp_path / "open").touch()
    envs.step_wait()
