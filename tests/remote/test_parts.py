"""A vector environment over parts is the one over workers; here the parts are threads.

``test_ray_cluster.py`` has the same over Ray.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from forks import in_fork
from part_hosts import BreakableHosts
from remote_play import play_groups, play_whoever_is_done
from stub_envs import LIMIT, Fault, Gate, StubEnv, Unseekable, stub_factory
from vector_reference import (
    NEXT_STEP,
    SAME_STEP,
    advance,
    assert_same,
    begin,
    by_autoreset,
    by_mode,
    follow,
    follower,
    stub_vecs,
)

import vla_gym
from vla_gym.errors import ConfigError, InvalidActionError, WorkerError, WorkerRestartWarning
from vla_gym.remote.ray_hosts import RayShard
from vla_gym.remote.shards import ThreadHosts
from vla_gym.remote.vector_env import RemoteVectorEnv
from vla_gym.rollout import Start, play
from vla_gym.rollout.policies import RandomPolicy
from vla_gym.variation import VARIATION_WIDTH
from vla_gym.vector import LiberoVectorEnv


class VariedStub(StubEnv):
    """A stub; every other one has the infos of a varied scene and of a staged reward."""

    def _info(self, success, steps):
        variation = np.full(VARIATION_WIDTH, self.index + 0.5 * self.count)
        more = {"progress": 0.25 * self.count, "variation": variation}
        return super()._info(success, steps) | (more if self.index % 2 else {})


@pytest.fixture
def make_vec():
    """Make stub vector envs over parts, and close them after the test."""
    with stub_vecs(RemoteVectorEnv, workers=0) as make:
        yield lambda num_envs=8, hosts=None, stubs=None, **kwargs: make(
            num_envs, stubs, hosts=ThreadHosts(3) if hosts is None else hosts, **kwargs
        )


# Equality


@by_mode
def test_lock_step_equals_single_environments(make_vec, mode):
    envs = make_vec(autoreset_mode=mode, rich_info=True)
    assert envs.worker_of.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    expected = follower(8, 5, mode, rich_info=True)
    follow(envs, expected, 5, 4, stagger=[1, 6])
    assert not envs.worker_pids


@by_mode
def test_groups_and_whoever_is_done_equal_single_environments(make_vec, mode):
    envs = make_vec(autoreset_mode=mode, rich_info=True)
    play_groups(envs, follower(8, 5, mode, rich_info=True), seed=5, turns=12)
    play_whoever_is_done(envs, follower(8, 9, mode, rich_info=True), seed=9, turns=20)


@by_autoreset
def test_infos_of_varied_scenes_are_those_without_parts(mode):
    played = []
    for make in (LiberoVectorEnv, partial(RemoteVectorEnv, hosts=ThreadHosts(2))):
        factory = partial(VariedStub, script=[(2, LIMIT)])
        envs = make(6, env_factory=factory, workers=0, autoreset_mode=mode)
        played.append([envs.reset(seed=3), *(envs.step(np.zeros((6, 3))) for _ in range(4))])
        envs.close()
    assert_same(played[1], played[0])


def test_one_part_and_more_parts_than_environments(make_vec):
    for count in (1, 5):
        envs = make_vec(3, ThreadHosts(count))
        assert len(envs.places) == min(count, 3)
        follow(envs, follower(3, 2, NEXT_STEP), 2, 3)


def test_a_slow_environment_holds_up_nobody_else(make_vec, tmp_path):
    gate = Gate(str(tmp_path / "open"))
    envs = make_vec(6, ThreadHosts(2), {0: {"gates": [gate]}}, workers=3, script=[(9, LIMIT)])
    expected = begin(envs, 4, script=[(9, LIMIT)])
    envs.send(expected.actions(), np.arange(6))
    for _ in range(3):  # the others go on, its mates in the same part too
        result = envs.recv(min_envs=5, timeout=20)
        ids = result[4]["env_id"].tolist()
        assert ids == [1, 2, 3, 4, 5]
        expected.check_step(result, ids=ids)
        envs.send(expected.actions(ids), ids)
    expected.check_step(envs.recv(env_ids=[2, 1, 5], timeout=20), ids=[1, 2, 5])
    with pytest.raises(TimeoutError):
        envs.recv(env_ids=[0], timeout=0.05)
    (tmp_path / "open").touch()
    expected.check_step(envs.recv(env_ids=[0], timeout=20), ids=[0])
    expected.check_step(envs.recv(timeout=20), ids=[3, 4])


def test_views_and_copies(make_vec):
    envs = make_vec(2, copy=False)
    first, _ = envs.reset(seed=0)
    kept = first["proprio"].copy()
    envs.step(np.zeros((2, 3), np.float32))
    assert_same(first["proprio"], kept)
    assert envs.get_state()[0].env["count"] == 1


def test_calls_attributes_and_options(make_vec):
    envs = make_vec(4, ThreadHosts(2))
    with pytest.raises(gym.error.ResetNeeded):
        envs.step(np.zeros((4, 3), np.float32))
    obs, infos = envs.reset(seed=1, options={"task_id": np.array([3, -1, 0, -1])})
    assert obs["task_id"].tolist() == [3, 2, 0, 4]
    assert infos["instruction"].tolist() == [f"do task {i}" for i in (3, 2, 0, 4)]
    assert envs.call("add", 1, b=2) == (3, 103, 203, 303)
    assert envs.call_some([3, 0], "add", 5) == (305, 5)
    envs.set_attr("knob", [4, 5, 6, 7])
    assert envs.get_attr("knob") == (4, 5, 6, 7)
    assert np.array(envs.render()).shape == (4, 6, 5, 3)
    with pytest.raises(KeyError, match="stub call"):
        envs.call("fail")
    with pytest.raises(InvalidActionError, match="shape"):
        envs.step(np.zeros((3, 3), np.float32))
    envs.step(np.zeros((4, 3), np.float32))


def test_libero_plays_the_same_in_parts():
    arguments = {
        "num_envs": 3,
        "task_ids": [[7, 8], [0, 3, 5], [1]],
        "assets": "lite",
        "image_size": 64,
        "chunk_len": 8,
        "max_control_steps": 12,
        "gamma": 0.99,
        "autoreset_mode": "SAME_STEP",
        "workers": 1,
    }
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 3, 8, 7)).astype(np.float32)
    played = []
    for hosts in (None, ThreadHosts(2)):
        envs = gym.make_vec("Libero-goal-v0", hosts=hosts, **arguments)
        played.append([envs.reset(seed=3), *(envs.step(action) for action in actions)])
        # Environment 2, the first one of its part, goes on as environment 0, and 0 as 2.
        envs.set_state(envs.get_state()[::-1])
        played[-1] += [envs.step(action) for action in actions]
        envs.close()
    for local, remote in zip(*played, strict=True):
        assert_same(remote, local)


# Faults


@by_mode
def test_a_lost_part_is_a_lost_worker(make_vec, mode):
    script = [(3, LIMIT), (5, LIMIT)]
    hosts = BreakableHosts(3)
    envs = make_vec(8, hosts, autoreset_mode=mode, script=script)
    expected = begin(envs, 3, script=script)
    advance(envs, expected)
    hosts.shards[1].lose()
    with pytest.warns(WorkerRestartWarning, match="environments 3 .*4 .*5 .*LostPart"):
        advance(envs, expected, 8, lost=[3, 4, 5])
    assert hosts.placed == [0, 1, 2, 1]
    assert expected.lost == [0, 0, 0, 1, 1, 1, 0, 0]


@by_autoreset
def test_a_lost_step_has_the_infos_of_the_last_observation(mode):
    hosts = BreakableHosts(2)
    factory = partial(VariedStub, script=[(9, LIMIT)])
    envs = RemoteVectorEnv(2, hosts=hosts, env_factory=factory, workers=0, autoreset_mode=mode)
    envs.reset(seed=3)
    *_, before = envs.step(np.zeros((2, 3)))
    hosts.shards[1].lose()
    with pytest.warns(WorkerRestartWarning):
        *_, infos = envs.step(np.zeros((2, 3)))
    lost = infos.get("final_info", infos)
    for key in ("progress", "variation", "elapsed_steps", "task_id"):
        assert_same(lost[key][1], before[key][1])
    envs.close()


def test_a_restart_that_is_told_as_an_error_drops_no_other(make_vec):
    hosts = BreakableHosts(2)
    envs = make_vec(4, hosts, script=[(9, LIMIT)])
    envs.reset(seed=0)
    for shard in list(hosts.shards.values()):
        shard.lose()
    with warnings.catch_warnings(action="error", category=WorkerRestartWarning):
        with pytest.raises(WorkerRestartWarning, match="restarted"):
            envs.step(np.zeros((4, 3), np.float32))
    follow(envs, follower(4, 3, NEXT_STEP, script=[(9, LIMIT)]), 3, 1)


def test_a_part_lost_while_some_are_sent(make_vec):
    hosts = BreakableHosts(2)
    envs = make_vec(4, hosts, script=[(9, LIMIT)])
    expected = begin(envs, 3, script=[(9, LIMIT)])
    envs.send(expected.actions([0, 2]), [0, 2])
    hosts.shards[1].lose()
    with pytest.warns(WorkerRestartWarning):
        result = envs.recv()
    expected.check_step(result, ids=[0, 2], lost=[2])
    # Environment 3 lost its episode while it had nothing to do: that shows at its next step.
    envs.send(expected.actions([3]), [3])
    expected.check_step(envs.recv(), ids=[3], lost=[3])
    advance(envs, expected, 3)


def test_a_part_is_placed_until_it_comes_up(make_vec):
    hosts = BreakableHosts(2)
    envs = make_vec(4, hosts, autoreset_mode=SAME_STEP, script=[(9, LIMIT)])
    expected = begin(envs, 3, script=[(9, LIMIT)])
    hosts.dead_on_arrival = 2
    hosts.shards[0].lose()
    with pytest.warns(WorkerRestartWarning) as told:
        advance(envs, expected, 3, lost=[0, 1])
    assert hosts.placed == [0, 1, 0, 0, 0] and len(told) == 1


def test_a_part_that_never_comes_up_or_falls_silent(make_vec):
    hosts = BreakableHosts(2)
    hosts.dead_on_arrival = 99
    with pytest.raises(WorkerError, match=r"\[0\] have not come up in 1.2 s"):
        make_vec(2, hosts, start_timeout=1.2)
    assert hosts.closed == 1
    hosts = BreakableHosts(2)
    envs = make_vec(2, hosts, start_timeout=1.0, step_timeout=0.5, script=[(9, LIMIT)])
    expected = begin(envs, 3, script=[(9, LIMIT)])
    hosts.shards[0].silent = True
    with pytest.warns(WorkerRestartWarning, match="did not answer in 1.5 s"):
        advance(envs, expected, 3, lost=[0])


def test_it_gives_up_after_max_restarts(make_vec):
    hosts = BreakableHosts(2)
    envs = make_vec(2, hosts, max_restarts=1, script=[(9, LIMIT)])
    envs.reset(seed=0)
    with warnings.catch_warnings(action="ignore", category=WorkerRestartWarning):
        hosts.shards[0].lose()
        for _ in range(2):  # the second step resets: the part is up again
            envs.step(np.zeros((2, 3), np.float32))
        hosts.shards[0].lose()
        with pytest.raises(WorkerError, match="giving up"):
            envs.step(np.zeros((2, 3), np.float32))
    with pytest.raises(WorkerError, match="has failed"):
        envs.reset()


@by_mode
def test_a_worker_that_dies_in_a_part(make_vec, once, stub_server, mode):
    stubs = {4: {"faults": [once("SIGKILL", step=2)]}}
    script = [(3, LIMIT), (4, LIMIT)]
    envs = make_vec(6, ThreadHosts(2), stubs, autoreset_mode=mode, script=script, workers=3)
    expected = begin(envs, 3, script=script)
    advance(envs, expected)
    with pytest.warns(WorkerRestartWarning, match=r"environments 4 \(.*SIGKILL"):
        result = envs.step(expected.actions())
    expected.check_step(result, lost=[4])
    if mode == SAME_STEP:
        assert result[4]["final_info"]["worker_restarted"].tolist() == [i == 4 for i in range(6)]
    advance(envs, expected, 5)
    assert once.reached() == 1 and expected.lost == [0, 0, 0, 0, 1, 0]


def test_environments_that_cannot_seek_go_on_as_reproducibly(once, stub_server):
    """After a worker of a part died: as they do without parts."""
    played = []
    for make_envs in (LiberoVectorEnv, partial(RemoteVectorEnv, hosts=ThreadHosts(2))):
        faults = [once("SIGKILL", episode=1)]

        def make(index: int, faults=faults):
            return Unseekable(index, faults=faults if index == 3 else (), script=[(2, LIMIT)])

        envs = make_envs(4, env_factory=make, workers=2)
        envs.reset(seed=3)
        with pytest.warns(WorkerRestartWarning):
            shown = [envs.step(np.zeros((4, 3), np.float32))[0] for _ in range(8)]
        # Those of the killed worker: parts have others.
        played.append([obs["proprio"][3] for obs in shown])
        envs.close()
    assert once.reached() == 2
    assert_same(played[1], played[0])


def test_errors_of_the_package_are_raised_here(make_vec):
    with pytest.raises(ConfigError, match="stub error in init"):
        make_vec(4, stubs={3: {"faults": [Fault("error", "init")]}})
    envs = make_vec(4, stubs={3: {"faults": [Fault("error", step=2)]}}, script=[(9, LIMIT)])
    envs.reset(seed=0)
    envs.step(np.zeros((4, 3), np.float32))
    with pytest.raises(ConfigError, match="stub error in step"):
        envs.step(np.zeros((4, 3), np.float32))
    expected = begin(envs, 8, script=[(9, LIMIT)])
    envs.send(expected.actions([3]), [3])
    expected.check_step(envs.recv(), ids=[3])
    envs.send(expected.actions([0, 3]), [0, 3])
    with pytest.raises(ConfigError, match="stub error in step"):
        envs.recv(env_ids=[3])
    expected.check_step(envs.recv(env_ids=[0]), ids=[0])
    follower(4, 8, NEXT_STEP, script=[(9, LIMIT)]).check_reset(envs.reset(seed=8))


def test_two_workers_of_a_part_that_raise_at_once(once, stub_server):
    """One at once and one while the third is slow, whose row is not that of the next reset."""
    played = []
    for make in (LiberoVectorEnv, partial(RemoteVectorEnv, hosts=ThreadHosts(1))):
        late = {"faults": [once("error")], "delay": 0.2}
        stubs = {0: {"faults": [once("error")]}, 1: late, 2: {"delay": 0.6}}
        envs = make(3, env_factory=stub_factory(stubs, script=[(2, LIMIT)]), workers=3)
        envs.reset(seed=3)
        actions = np.ones((3, 3), np.float32)
        with pytest.raises(ConfigError, match="stub error in step"):
            envs.step(actions)
        played.append([envs.reset(seed=8), *(envs.step(actions) for _ in range(4))])
        envs.close()
    assert once.reached() == 4
    assert_same(played[1], played[0])


@pytest.mark.timeout(15, func_only=True)
def test_states_of_a_part_whose_workers_have_failed_for_good(make_vec, stub_server):
    stubs = {0: {"faults": [Fault("SIGKILL")]}}
    envs = make_vec(1, ThreadHosts(1), stubs, workers=1, max_restarts=0)
    envs.reset(seed=0)
    with pytest.raises(WorkerError, match="SIGKILL"):
        envs.step(np.zeros((1, 3), np.float32))
    with pytest.raises(WorkerError, match="has failed"):
        envs.get_state()


# Wrong input


def test_a_machine_with_another_version_or_other_assets_is_refused(make_vec, monkeypatch):
    pool = "vla_gym.remote.pool"
    monkeypatch.setattr(f"{pool}.vla_gym", type("Other", (), {"__version__": "9.9"}))
    with pytest.raises(ConfigError, match=f"runs vla_gym 9.9, the node has {vla_gym.__version__}"):
        make_vec(2)
    monkeypatch.undo()
    monkeypatch.setattr(f"{pool}.asset_digest", lambda _: "f" * 64)
    with pytest.raises(ConfigError, match="asset pack 'lite' has digest ffffffffffff here"):
        RemoteVectorEnv(2, "goal", hosts=ThreadHosts(1), assets="lite", workers=0)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'vla-gym\[ray\]'"):
        gym.make_vec("Libero-goal-v0", 2, hosts="ray", assets="lite")


def test_bad_arguments(make_vec):
    for wrong, match in (
        ({"hosts": "grid"}, "hosts must be"),
        ({"step_timeout": 0}, "step_timeout"),
        ({"env_ids": range(2)}, "env_ids"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_vec(2, **wrong)
    for ids in ([0, 1], range(0, 4, 2), range(3, 9)):
        with pytest.raises(ConfigError, match="env_ids must be a range of consecutive numbers"):
            LiberoVectorEnv(4, env_factory=stub_factory(), workers=0, env_ids=ids)


@pytest.mark.parametrize(
    ("name", "wrong"), [("start_timeout", np.nan), ("vector_wrappers", 5), ("nonsense", 1)]
)
def test_a_bad_argument_is_one_error_before_anything_is_placed(name, wrong):
    hosts = BreakableHosts(1)
    with pytest.raises(ConfigError, match=name):
        RemoteVectorEnv(2, "goal", hosts=hosts, assets="lite", **{"workers": 0, name: wrong})
    assert not hosts.placed


def test_what_a_node_cannot_be_told_leaves_no_gap_in_the_numbers_of_commands():
    numbers = []

    def remote(number, *command):
        cloudpickle.dumps(command)  # as Ray does
        numbers.append(number)
        return SimpleNamespace(future=Future)

    shard = RayShard(None, SimpleNamespace(submit=SimpleNamespace(remote=remote)), "a node")
    shard.submit("call", {}, "add")
    with pytest.raises(ConfigError, match="told to call, since .* cannot be pickled.*lock"):
        shard.submit("call", {0: (threading.Lock(),)}, "add")
    shard.submit("call", {}, "add")
    assert numbers == [0, 1]


def test_what_cannot_be_sent_is_one_error_and_no_host_stays(make_vec, monkeypatch):
    hosts = BreakableHosts(2)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to another process.*lock"):
        make_vec(2, hosts, {0: {"faults": [lock]}})
    assert hosts.closed == 1 and not hosts.placed

    def broken(_):
        raise OSError("a broken disk")

    monkeypatch.setattr("vla_gym.remote.pool.asset_digest", broken)
    with pytest.raises(OSError, match="a broken disk"):
        make_vec(2, hosts)
    assert hosts.closed == 2 and not hosts.placed


def test_a_fork_cannot_close_its_parents_parts(make_vec):
    hosts = BreakableHosts(2)
    envs = make_vec(2, hosts, script=[(9, LIMIT)])
    envs.reset(seed=0)

    def close():
        envs.close()
        if hosts.closed:
            raise WorkerError("the hosts are closed")

    assert in_fork(close) == "" and hosts.closed == 0
    envs.step(np.zeros((2, 3), np.float32))


def test_closing_is_quick_and_final(make_vec):
    hosts = BreakableHosts(3)
    envs = make_vec(6, hosts, workers=1)
    envs.reset(seed=0)
    began = time.monotonic()
    envs.close()
    assert hosts.closed == 1 and time.monotonic() - began < 5
    with pytest.raises(gym.error.ClosedEnvironmentError):
        envs.step(np.zeros((6, 3), np.float32))


def test_closing_ends_all_parts_though_one_cannot_be_told(make_vec, monkeypatch):
    """E.g. since the program has shut Ray down."""
    hosts, killed = BreakableHosts(2), []
    envs = make_vec(2, hosts)
    monkeypatch.setattr(hosts.shards[0], "submit", None)  # raises when it is called
    for shard in hosts.shards.values():
        monkeypatch.setattr(shard, "kill", lambda: killed.append(True))
    envs.close()
    assert hosts.closed == 1 and len(killed) == 2


def test_the_player_plays_the_same_episodes_in_parts():
    starts = [Start.official("goal", task, 0) for task in (0, 3, 7)]
    settings = {"num_envs": 3, "workers": 0, "assets": "lite", "max_control_steps": 24}
    played = [
        sorted(play(RandomPolicy(3), starts, hosts=hosts, **settings), key=lambda e: e.start)
        for hosts in (None, ThreadHosts(2))
    ]
    assert played[0] == played[1] and len(played[0]) == 3


@by_mode
def test_states_of_a_part_that_was_lost_are_those_of_the_next_episodes(make_vec, mode):
    hosts = BreakableHosts(2)
    envs = make_vec(4, hosts, autoreset_mode=mode, script=[(6, LIMIT)])
    envs.reset(seed=0)
    envs.step(np.zeros((4, 3), np.float32))
    hosts.shards[1].lose()
    with pytest.warns(WorkerRestartWarning):
        states = envs.get_state()
    assert [state.env is None for state in states] == [False, False, True, True]
    hosts.shards[0].lose()
    with pytest.warns(WorkerRestartWarning):
        obs = envs.set_state(states)
    assert obs["proprio"][:, 1:3].tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
