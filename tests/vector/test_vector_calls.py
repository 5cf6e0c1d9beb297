"""The vector env's own ways: send and recv, groups, calls, states, wrappers; and misuse."""

import pickle
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from stub_envs import LIMIT, SUCCESS, Fault, Gate, StubEnv, stub_factory
from trees import assert_same
from vector_reference import (
    DISABLED,
    NEXT_STEP,
    advance,
    begin,
    by_autoreset,
    by_mode,
    by_workers,
    follow,
    follower,
    rows,
)

from vla_gym.errors import ConfigError, InvalidActionError, UnknownTaskError, VlaGymError
from vla_gym.vector import LiberoVectorEnv

pytestmark = pytest.mark.usefixtures("nothing_stays")


# Misuse


@by_workers
def test_disabled_refuses_to_step_an_ended_env(make_vec, workers):
    script, own = {"script": [(3, LIMIT)]}, {2: {"script": [(1, LIMIT)]}}
    envs = make_vec(3, own, workers=workers, autoreset_mode=DISABLED, **script)
    expected = begin(envs, 4, own, **script)
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
    huge = np.full((3, 3), 1e39)  # finite, but not as float32
    for actions, match in (
        *((wrong, "shape") for wrong in (np.zeros((2, 3)), np.zeros(9), [["a"] * 3] * 3)),
        (torch.zeros((3, 3), requires_grad=True), "shape"),
        (torch.zeros((3, 3), device="meta"), "shape"),  # as one on a GPU
        (bad, r"\[1\] are not finite"),
        (huge, r"\[0, 1, 2\] are not finite"),
    ):
        with pytest.raises(InvalidActionError, match=match):
            envs.step(actions)
    expected.check_step(envs.step(expected.actions()))


def test_calls_in_the_wrong_order(make_vec):
    envs = make_vec(2, stub_factory(script=[(9, LIMIT)]), workers=1)
    expected = begin(envs, 0, script=[(9, LIMIT)])
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
    with pytest.raises(ConfigError, match="min_envs must be an integer, got 1.5"):
        envs.recv(1.5)
    expected.check_step(envs.recv(), ids=[1])
    with pytest.raises(ConfigError, match="Nothing was sent"):
        envs.recv()
    for options, match in ((["task_id"], "must be a dict"), ({"reset_mask": None}, "as env_ids")):
        with pytest.raises(ConfigError, match=match):
            envs.reset_send([1], options=options)
    expected.check_step(envs.step(expected.actions()))
    envs.close()
    for method in (partial(envs.step, expected.actions()), envs.reset, envs.render):
        with pytest.raises(gym.error.ClosedEnvironmentError):
            method()
    envs.close()  # twice is fine


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"num_envs": 0}, ConfigError, "num_envs must be in"),
        ({"workers": -1}, ConfigError, "workers must be at least"),
        ({"task_ids": 10}, UnknownTaskError, "task_id 10 is out"),
        ({"task_ids": [[1], [2], [3]]}, ConfigError, "got 3"),
        ({"task_ids": [[1], []]}, ConfigError, "needs a task"),
        ({"group_size": 0}, ConfigError, "group_size must be in"),
        ({"autoreset_mode": "LATER"}, ConfigError, "autoreset_mode"),
        ({"max_restarts": -1}, ConfigError, "max_restarts must be"),
        ({"step_timeout": 0}, ConfigError, "step_timeout must be"),
        ({"render_devices": 0}, ConfigError, "render_devices lists"),
        ({"render_devices": "01"}, ConfigError, "render_devices lists"),
        ({"render_devices": [0, "1"]}, ConfigError, "A render device must be an integer"),
        ({"suite": None}, ConfigError, "Give a suite"),
        ({"suite": None, "env_factory": stub_factory(), "chunk_len": 8}, ConfigError, "leave out"),
    ],
)
def test_wrong_arguments_give_one_clear_error(kwargs, error, match):
    with pytest.raises(error, match=match):
        LiberoVectorEnv(**{"num_envs": 2, "suite": "goal", **kwargs})


def test_envs_must_share_their_spaces():
    def factory(index):
        env = StubEnv(index)
        if index == 2:
            env.action_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        return env

    for workers in (0, 2):
        with pytest.raises(ConfigError, match="2"):
            LiberoVectorEnv(3, env_factory=factory, workers=workers)


@by_workers
def test_an_observation_without_an_entry_is_an_error(make_vec, workers):
    """What was there two steps before must not stand in for it."""

    class Forgets(gym.Wrapper):
        def step(self, action):
            obs, *rest = super().step(action)
            del obs["task_id"]
            return obs, *rest

    envs = make_vec(2, workers=workers, env_wrappers=[Forgets])
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match=r"Expected an observation with the entries .*task_id"):
        envs.step(np.zeros((2, 3), np.float32))


def test_what_cannot_be_sent_to_a_worker(make_vec):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="environments cannot be sent to another process.*lock"):
        LiberoVectorEnv(1, env_factory=lambda i: StubEnv(i + bool(lock)), workers=1)
    envs = make_vec(2, workers=2)
    expected = begin(envs, 0)
    with pytest.raises(ConfigError, match="arguments cannot be sent to another process.*lock"):
        envs.set_attr("script", [None, lock])
    expected.check_step(envs.step(expected.actions()))


# Sending and receiving


@by_workers
@by_autoreset
def test_send_and_recv_give_the_episodes_of_step(make_vec, mode, workers):
    envs = make_vec(4, workers=workers, autoreset_mode=mode)
    expected = follower(4, 50, mode)
    envs.reset_send(seed=50)
    expected.check_step(envs.recv(), ids=range(4), reset=range(4))
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
    expected = begin(envs, 0, **script)
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
    expected = begin(envs, 0, **script)
    envs.step_async(expected.actions())
    with pytest.raises(TimeoutError):
        envs.step_wait(timeout=0.05)
    (tmp_path / "open").touch()
    expected.check_step(envs.step_wait())
    expected.check_step(envs.step(expected.actions()))


def test_a_masked_reset_and_a_step_may_be_sent_together(make_vec):
    envs = make_vec(4, workers=2, autoreset_mode=DISABLED)
    expected = begin(envs, 9)
    for _ in range(12):
        due = np.flatnonzero(expected.due).tolist()
        ready = sorted(set(range(4)) - set(due))
        if ready:
            envs.send(expected.actions(ready), ready)
        if due:
            envs.reset_send(due)
        expected.check_step(envs.recv(), ids=range(4), reset=due)


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
    for wrong in (0, num_envs + 1, 1.5):
        with pytest.raises(ConfigError, match="number of groups must be"):
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
    expected = begin(envs, 60, **script)
    advance(envs, expected, 2)
    states = pickle.loads(pickle.dumps(envs.get_state()))
    assert len(states) == 3 and len(envs.get_state([2])) == 1
    marks = expected.episode[0], expected.count[0], expected.last[0]
    advance(envs, expected, 2)
    # Env 1 goes on as env 0 was; the others stay where they are.
    envs.set_state([states[2]], [1])
    obs = envs.set_state([states[0]], [1])
    expected.references[1] = expected.references[0]
    expected.episode[1], expected.count[1], expected.last[1] = marks
    expected.due[1] = False
    for i in range(3):
        assert_same(rows(obs, i), expected.last[i], f"env {i} after set_state")
    advance(envs, expected, 10)
    with pytest.raises(ConfigError):
        envs.set_state(states, [0])


@by_workers
def test_lambdas_and_local_classes_travel_to_the_workers(make_vec, workers):
    bonus = 10.0  # a closure: only cloudpickle can carry it

    class Shout(gym.Wrapper):
        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            return obs, {**info, "shout": info["instruction"].upper()}

    paid = lambda env: gym.wrappers.TransformReward(env, lambda r: r + bonus)  # noqa: E731
    envs = make_vec(2, workers=workers, env_wrappers=[paid, Shout])
    assert envs.reset(seed=0)[1]["shout"].tolist() == ["DO TASK 0", "DO TASK 1"]
    assert (envs.step(np.zeros((2, 3), np.float32))[1] >= 10.25).all()


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
    expected = begin(envs, 0, **script)
    with pytest.raises(ConfigError, match=f"stub error in {at}"):
        for _ in range(4):
            expected.check_step(envs.step(expected.actions()))
    assert envs.worker_pids == pids and not recwarn.list
    follow(envs, follower(3, 70, NEXT_STEP, **script), 70, episodes=2)
