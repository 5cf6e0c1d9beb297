"""The vector environment over the nodes of a Ray cluster: three raylets on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from remote_play import play_groups, play_whoever_is_done
from stub_envs import LIMIT, stub_factory
from trees import assert_same
from vector_processes import MARKER, alive, marked, new_marker, wait_until
from vector_reference import SAME_STEP, advance, begin, by_mode, follow, follower, stub_vecs

from vla_gym.errors import ConfigError, WorkerError, WorkerRestartWarning
from vla_gym.remote.vector_env import RemoteVectorEnv

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vla-gym[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from vla_gym.remote.ray_inference import RayInference  # noqa: E402

# Not 127.0.0.1, which Ray takes for "this machine's address in the network".
NODE = {
    "node_ip_address": "127.0.0.2",
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}
PROGRAM = """
import sys, time
import numpy as np
from stub_envs import stub_factory
from vla_gym.remote.vector_env import RemoteVectorEnv

envs = RemoteVectorEnv(2, hosts="ray", env_factory=stub_factory(), workers=1)
envs.reset(seed=0)
envs.step(np.zeros((2, 3), np.float32))
print("playing on", envs.places[0].rpartition("(")[2][:-1], flush=True)
time.sleep(600)
"""


def test_a_dead_address_is_one_error_at_once():
    began = time.monotonic()
    with pytest.raises(ConfigError, match="No Ray cluster answers at 'ray://127.0.0.1:9'"):
        RemoteVectorEnv(2, hosts="ray://127.0.0.1:9", env_factory=stub_factory())
    assert time.monotonic() - began < 15


@pytest.fixture
def short_folder():
    """Ray makes sockets below it, whose names have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.slow  # Ray's agents look for their dead cluster for a minute before they end
def test_a_killed_program_leaves_nothing(tmp_path, short_folder):
    """It has started a cluster of its own, since there is none."""
    marker = new_marker()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    paths = os.pathsep.join(sys.path)
    environ = {**os.environ, "PYTHONPATH": paths, "RAY_TMPDIR": short_folder, MARKER: marker}
    environ.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, program], env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = process.stdout.readline()
        assert found == "playing on 127.0.0.2\n", found
        assert len(marked(marker)) > 3
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not marked(marker), "the end of all that the program started", 180)


def add_node(cluster, wait=True):
    cluster.add_node(num_cpus=1, resources={"sim": 1}, wait=wait, **NODE)


def node_of(cluster, envs, part):
    """The node that a part of a vector env is on."""
    wanted = envs._pool._hosts._placed[part]
    return next(node for node in cluster.worker_nodes if node.node_id == wanted)


@pytest.fixture(scope="module")
def cluster():
    """A head node that simulates nothing, three that do, and this process connected to them."""
    head = {"num_cpus": 0, **NODE}
    found = Cluster(initialize_head=True, connect=False, head_node_args=head)
    for _ in range(3):
        add_node(found, wait=False)
    found.wait_for_nodes()
    ray.init(found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def make_vec(cluster):
    with stub_vecs(RemoteVectorEnv, hosts="ray", workers=1) as make:
        yield lambda num_envs=8, **kwargs: make(num_envs, **kwargs)
    assert ray.is_initialized(), "the caller's own connection was closed"


@by_mode
def test_eight_over_three_nodes_equal_single_environments(make_vec, mode):
    envs = make_vec(autoreset_mode=mode, rich_info=True)
    assert envs.worker_of.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len(set(envs.call("pid"))) == 3
    expected = follower(8, 5, mode, rich_info=True)
    follow(envs, expected, 5, 4, stagger=[1, 6])
    play_groups(envs, follower(8, 6, mode, rich_info=True), seed=6, turns=10)
    play_whoever_is_done(envs, follower(8, 9, mode, rich_info=True), seed=9, turns=15)
    states = envs.get_state([0, 7])
    assert_same(envs.set_state(states, [0, 7])["proprio"][[0, 7], 0], np.float32([9, 16]))


@by_mode
def test_a_killed_actor_is_a_lost_worker(make_vec, mode):
    script = [(4, LIMIT), (5, LIMIT)]
    envs = make_vec(6, autoreset_mode=mode, script=script, workers=0)
    expected = begin(envs, 3, script=script)
    advance(envs, expected)
    os.kill(envs.call("pid")[2], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning, match="environments 2 .*3 "):
        advance(envs, expected, 8, lost=[2, 3])
    assert expected.lost == [0, 0, 1, 1, 0, 0]


def test_an_actor_may_die_twice_while_it_starts(make_vec):
    """Its environments are built by a process that is killed from outside."""

    class Factory:
        def __init__(self, flags, deaths):
            self.flags, self.deaths, self.stub = flags, deaths, stub_factory()

        def __call__(self, index: int):
            if len(os.listdir(self.flags)) < self.deaths:
                tempfile.mkstemp(dir=self.flags)
                os.kill(os.getpid(), signal.SIGKILL)
            return self.stub(index)

    with tempfile.TemporaryDirectory() as flags:
        envs = RemoteVectorEnv(1, hosts="ray", env_factory=Factory(flags, 2), workers=0)
        envs.reset(seed=0)
        envs.close()
        assert len(os.listdir(flags)) == 2
        with pytest.raises(WorkerError, match="is lost: ActorDiedError"):
            RemoteVectorEnv(1, hosts="ray", env_factory=Factory(flags, 9), workers=0)
        assert len(os.listdir(flags)) == 5


def test_states_of_a_simulation_come_back(cluster):
    del cluster
    arguments = {"task_ids": 7, "assets": "lite", "image_size": 8, "chunk_len": 2}
    with closing(RemoteVectorEnv(2, "goal", hosts="ray", workers=1, **arguments)) as envs:
        envs.reset(seed=4)
        states, actions = envs.get_state(), np.full(envs.action_space.shape, 0.5, np.float32)
        after = envs.step(actions)
        envs.set_state(states)
        assert_same(envs.step(actions), after)


def test_a_killed_node_truncates_its_environments_alone(cluster, make_vec):
    script = [(6, LIMIT)]
    envs = make_vec(8, autoreset_mode=SAME_STEP, script=script)
    expected = begin(envs, 3, script=script)
    advance(envs, expected, 2)
    pids = envs.call("pid")
    cluster.remove_node(node_of(cluster, envs, 1), allow_graceful=False)
    wait_until(lambda: not alive(pids[3]), "the end of the lost node's worker", 60)
    with pytest.warns(WorkerRestartWarning, match="environments 3 .*4 .*5 "):
        advance(envs, expected, 8, lost=[3, 4, 5])
    assert expected.lost == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [pid == old for pid, old in zip(envs.call("pid"), pids, strict=True)] == [
        i not in (3, 4, 5) for i in range(8)
    ]
    add_node(cluster)


def test_it_waits_for_a_node_to_join(cluster, make_vec):
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1, "the nodes' end", 60)
    with pytest.raises(ConfigError, match="No node of the Ray cluster has .*'sim' or a CPU"):
        make_vec(2, start_timeout=1)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make_vec, 2, script=[(9, LIMIT)], start_timeout=60)
        time.sleep(1)
        add_node(cluster)
        envs = made.result(60)
    expected = begin(envs, 1, script=[(9, LIMIT)])
    pid = envs.call("pid")[0]
    cluster.remove_node(node_of(cluster, envs, 0), allow_graceful=False)
    wait_until(lambda: not alive(pid), "the end of the lost node's worker", 60)
    with pytest.warns(WorkerRestartWarning):
        advance(envs, expected, 1, lost=[0, 1])
    add_node(cluster)
    advance(envs, expected, 3)
    for _ in range(2):
        add_node(cluster)


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_cannot_be_built_is_one_error():
    class Factory:
        def __call__(self, _: int):
            raise RuntimeError("no such robot")

    with pytest.raises(WorkerError, match="no such robot"):
        RemoteVectorEnv(2, hosts="ray", env_factory=Factory(), workers=0)


def frames(vla):
    shape = (1, vla.image_size, vla.image_size, 3)
    return {view: np.zeros(shape, np.uint8) for view in vla.cameras}, ["open the drawer"]


def test_inference_actors_serve_the_simulators_of_all_nodes(cluster):
    inference = RayInference("mini", actors=1, timeout=60)
    arguments = {"task_ids": 7, "assets": "lite", "max_control_steps": 16, "workers": 0}
    remote = gym.make_vec(
        "LiberoVLA-goal-v0",
        num_envs=3,
        vla=inference.vla(),
        chunk_len=8,
        hosts="ray",
        rl_token=None,
        **arguments,
    )
    local = gym.make_vec(
        "LiberoVLA-goal-v0", num_envs=3, vla="mini", chunk_len=8, rl_token=None, **arguments
    )
    try:
        seen = [envs.reset(seed=4)[0] for envs in (local, remote)]
        for _ in range(2):
            for key, rows in seen[0].items():  # batches differ, and with them the last bit
                np.testing.assert_allclose(seen[1][key], rows, atol=2e-5, err_msg=key)
            seen = [envs.step(seen[0]["vla_action"])[0] for envs in (local, remote)]
        weight, value = next(iter(local.vla.model.named_parameters()))
        assert inference.publish({weight: value + 1.0}) == 1
        changed = remote.step(seen[0]["vla_action"])[0]
        assert np.abs(changed["rl_token"] - seen[1]["rl_token"]).max() > 1e-2
        stats = inference.stats()[0]
        assert stats["rows"] == 3 * 4 and stats["forwards"] <= stats["requests"]
        # It dies in the middle, and comes again with the weights that it loads.
        inference._ray.kill(inference._actors[0], no_restart=False)
        remote.step(seen[0]["vla_action"])
        assert inference.stats()[0]["version"] == 0
        assert inference.publish({weight: value + 1.0}) == 2
        # What the VLA says of its inputs is its own error; an actor that stays dead is a lost one.
        vla, known = inference.vla(), inference.vla()
        with pytest.raises(Exception, match="(?s)proprio.*") as raised:
            vla.infer(*frames(vla), np.zeros((1, 3), np.float32))
        assert not isinstance(raised.value, WorkerError)
        inference._ray.kill(inference._actors[0], no_restart=True)
        for asked in (vla, known):
            with pytest.raises(WorkerError, match="The inference actor is lost"):
                asked.infer(*frames(asked), np.zeros((1, 8), np.float32))
        with pytest.raises(WorkerError, match="actor did not tell what it has done"):
            inference.stats()
    finally:
        local.close()
        remote.close()
        inference.close()
