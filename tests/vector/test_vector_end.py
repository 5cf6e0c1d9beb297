"""However a vector env or its trainer ends, nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from stub_envs import LIMIT, Fault, Gate, stub_factory
from vector_processes import (
    MARKER,
    SOON,
    alive,
    descriptors,
    marked,
    memfd_maps,
    new_marker,
    orphan_blocks,
    wait_until,
)
from vector_reference import advance, begin, by_mode

from vla_gym.errors import WorkerRestartWarning
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vector.process_pool import ProcessPool
from vla_gym.vector.runner import Runner

pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.mark.parametrize("kind", ["gate", "SIGSTOP", "dead"])
def test_close_during_a_step(make_vec, tmp_path, kind):
    """Also with a worker that hangs, is stopped or is dead: close() waits for none of them."""
    path = tmp_path / "reached"
    if kind == "SIGSTOP":
        own = {"faults": [Fault("SIGSTOP", flag=str(path))]}
    else:
        own, path = {"gates": [Gate(str(path))]}, tmp_path / "reached.entered"
    envs = make_vec(4, {1: own})
    pids = envs.worker_pids
    envs.reset(seed=0)
    envs.step_async(np.zeros((4, 3), np.float32))
    wait_until(path.exists, "the step")
    if kind == "dead":
        os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    envs.close()
    assert time.monotonic() - began < SOON / 2  # far less than the stub sleeps or step_timeout
    assert not any(alive(pid) for pid in pids)


def test_close_frees_everything_at_once():
    """Also while the closed object is still there."""
    before, maps = len(descriptors()), memfd_maps()
    envs = LiberoVectorEnv(4, env_factory=stub_factory(), workers=2)
    envs.reset(seed=0)
    result = envs.step(np.zeros((4, 3), np.float32))
    pids = envs.worker_pids
    assert memfd_maps() == maps + 1 and len(descriptors()) > before
    envs.close()
    assert not any(alive(pid) for pid in pids)
    assert len(descriptors()) == before
    gc.collect()
    assert memfd_maps() == maps
    assert result[0]["image"].any()


def test_garbage_collection_ends_the_workers():
    envs = LiberoVectorEnv(4, env_factory=stub_factory(), workers=2, copy=False)
    pids = envs.worker_pids
    obs, _ = envs.reset(seed=0)
    before = obs["image"].copy()
    assert all(alive(pid) for pid in pids)
    del envs
    gc.collect()
    wait_until(lambda: not any(alive(pid) for pid in pids), "the workers' end")
    np.testing.assert_array_equal(obs["image"], before)


def test_a_constructor_that_is_interrupted_leaves_nothing(monkeypatch):
    """The fixture nothing_stays is the test."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LiberoVectorEnv(4, env_factory=stub_factory(), workers=2)


@by_mode
def test_the_server_dies_under_a_running_env(make_vec, mode):
    """All workers die with it: either all of it is restarted, or there is one clear error."""
    envs = make_vec(4, autoreset_mode=mode, script=[(5, LIMIT)])
    expected = begin(envs, 0, script=[(5, LIMIT)])
    advance(envs, expected, 2)
    pids = envs.worker_pids
    os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in pids), "the workers' end with their server")
    with pytest.warns(WorkerRestartWarning) as caught:
        expected.check_step(envs.step(expected.actions()), lost=range(4))
    assert {item.category for item in caught} == {WorkerRestartWarning}
    advance(envs, expected, 8)


def test_two_vector_envs_share_a_server_and_do_not_end_each_other(make_vec):
    first, second = make_vec(2), make_vec(2)
    pids = first.worker_pids[0], second.worker_pids[1]
    assert len({psutil.Process(pid).ppid() for pid in pids}) == 1
    expected = begin(second, 0)
    first.reset(seed=0)
    first.close()
    advance(second, expected, 5)


# Trainers: scripts of their own, without a __main__ guard

HEADER = """
import json, os, signal, sys, time
import numpy as np
from stub_envs import *
from vla_gym.vector import LiberoVectorEnv

folder = sys.argv[1]
gate = Gate(os.path.join(folder, "gate"), step=2)
actions = np.zeros((4, 3), np.float32)

def make(own):
    return LiberoVectorEnv(4, env_factory=stub_factory({1: own}, script=[(3, LIMIT)]), workers=2)

def report(envs):
    text = json.dumps({"workers": envs.worker_pids})
    with open(os.path.join(folder, "pids.tmp"), "w") as file:
        file.write(text)
    os.rename(file.name, os.path.join(folder, "pids"))
"""
STEPPING = """
envs = make({"gates": [gate]})
envs.reset(seed=0)
report(envs)
envs.step(actions)
envs.step(actions)  # never returns: env 1 waits
"""


class Trainer:
    """A script in a process group of its own, as in a terminal."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.marker = folder, new_marker()
        self.blocks = set(os.listdir("/dev/shm"))
        (folder / "train.py").write_text(HEADER + script)
        helpers = Path(__file__).parents[1] / "helpers"
        root = Path(__file__).parents[2]
        paths = [str(helpers), str(root), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, MARKER: self.marker, "PYTHONPATH": os.pathsep.join(paths)}
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(folder / "train.py"), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
                cwd=folder,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for(self, name: str) -> None:
        def there():
            assert self.process.poll() is None, self.output
            return (self.folder / name).exists()

        wait_until(there, f"{name} of the trainer")

    def signal(self, number: int) -> None:
        """As the terminal does it: to the whole process group."""
        os.killpg(self.process.pid, number)

    def check_end(self) -> int:
        """Wait for its end; nothing may stay."""
        code = self.process.wait(SOON)
        wait_until(lambda: not marked(self.marker), f"the end of {marked(self.marker)}")
        wait_until(lambda: not orphan_blocks(self.blocks), "the end of shared blocks")
        return code

    def kill(self) -> None:
        for pid in (self.process.pid, *marked(self.marker)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def train(tmp_path):
    running = []

    def start(script):
        running.append(Trainer(tmp_path, script))
        return running[-1]

    yield start
    for trainer in running:
        trainer.kill()


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_a_trainer_that_is_ended_in_a_step_leaves_nothing(train, name):
    trainer = train(STEPPING)
    trainer.wait_for("gate.entered")
    workers = json.loads((trainer.folder / "pids").read_text())["workers"]
    # Otherwise the check at the end would prove nothing.
    server = psutil.Process(workers[0]).ppid()
    assert {trainer.process.pid, server, *workers} <= marked(trainer.marker)
    # Nothing has a name in /dev/shm, so nothing can stay there.
    for pid in (trainer.process.pid, server, *workers):
        assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()
    assert os.getpgid(workers[0]) != os.getpgid(trainer.process.pid)
    trainer.signal(getattr(signal, name))
    code = trainer.check_end()
    wait_until(lambda: not any(alive(pid) for pid in (server, *workers)), "the workers' end")
    if name == "SIGINT":
        assert code == -signal.SIGINT and "KeyboardInterrupt" in trainer.output
        assert "Exception ignored" not in trainer.output, trainer.output
    else:
        assert code == -getattr(signal, name)


def test_ctrl_c_while_workers_start_leaves_nothing(train):
    trainer = train(
        """
envs = make({"faults": [Fault("hang", "init", flag=os.path.join(folder, "hangs"))]})
envs.reset(seed=0)
"""
    )
    trainer.wait_for("hangs")
    trainer.signal(signal.SIGINT)
    assert trainer.check_end() == -signal.SIGINT, trainer.output


def test_a_trainer_that_forgets_to_close_leaves_nothing(train):
    ending = "held = [envs]; held.append(held)\nenvs.step_async(actions)\nraise RuntimeError"
    trainer = train(f"envs = make({{}})\nenvs.reset(seed=0)\nreport(envs)\n{ending}\n")
    assert trainer.check_end() == 1, trainer.output
    assert "Exception ignored" not in trainer.output and "leaked" not in trainer.output
    workers = json.loads((trainer.folder / "pids").read_text())["workers"]
    assert len(workers) == 2
    wait_until(lambda: not any(alive(pid) for pid in workers), "the workers' end")


def test_after_ctrl_c_in_a_step_a_reset_goes_on(train):
    """As in a notebook."""
    trainer = train(
        """
envs = make({"gates": [gate]})
envs.reset(seed=0)
pids = envs.worker_pids
envs.step(actions)
try:
    envs.step(actions)
except KeyboardInterrupt:
    print("interrupted")
open(os.path.join(folder, "gate"), "w").close()
for seed in (5, 6):
    obs, _ = envs.reset(seed=seed)
    assert obs["proprio"][:, :3].tolist() == [[seed + i, 0, 0] for i in range(4)], obs["proprio"]
    obs, _, terminated, truncated, _ = envs.step(actions)
    assert (obs["proprio"][:, 2] == 1).all()
assert envs.worker_pids == pids
envs.close()
print("went on")
"""
    )
    trainer.wait_for("gate.entered")
    trainer.signal(signal.SIGINT)
    assert trainer.check_end() == 0, trainer.output
    assert trainer.output.split("\n")[:2] == ["interrupted", "went on"]


@pytest.mark.parametrize("place", ["run", "_send", "_receive", "_progress"])
def test_ctrl_c_between_two_messages_loses_none(make_vec, monkeypatch, place):
    """It comes while a step waits or when it is over; a reset goes on with the same workers."""
    envs = make_vec(4, script=[(9, LIMIT)])
    pids, actions = envs.worker_pids, np.zeros((4, 3), np.float32)
    envs.reset(seed=0)
    original = getattr(ProcessPool, place)

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return result

    for seed in (5, 6):
        monkeypatch.setattr(ProcessPool, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.step(actions)
        expected = begin(envs, seed, script=[(9, LIMIT)])
        advance(envs, expected, 3)
    assert envs.worker_pids == pids


def interrupt_a_wait(monkeypatch):
    def poll(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ProcessPool, "poll", poll)
    return pytest.raises(KeyboardInterrupt)


@pytest.mark.parametrize("closed", [False, True])
def test_what_an_interrupted_step_comes_to_is_thrown_away(make_vec, monkeypatch, closed):
    envs = make_vec(2, {1: {"faults": [Fault("error")]}})
    envs.reset(seed=0)
    with interrupt_a_wait(monkeypatch):
        envs.step(np.zeros((2, 3), np.float32))
    if closed:
        envs.close()
        with pytest.raises(ClosedEnvironmentError):
            envs.reset(seed=5)
    else:
        assert envs.reset(seed=5)[0]["proprio"][:, 0].tolist() == [5, 6]


def test_after_ctrl_c_in_recv_a_reset_throws_nothing_away_that_came_later(make_vec, monkeypatch):
    envs, actions = make_vec(2, script=[(9, LIMIT)]), np.zeros((2, 3), np.float32)
    envs.reset(seed=0)
    envs.send(actions, [0, 1])
    with interrupt_a_wait(monkeypatch):
        envs.recv()
    assert len(envs.recv()[1]) == 2
    envs.step_async(actions)
    with pytest.raises(AlreadyPendingCallError):
        envs.reset()
    assert envs.step_wait()[0]["proprio"][:, 2].tolist() == [2, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c_in_a_call_leaves_no_answer_behind(make_vec, monkeypatch, workers):
    envs = make_vec(2, workers=workers, script=[(9, LIMIT)])
    expected = begin(envs, 0, script=[(9, LIMIT)])
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        envs.call("nap")
    advance(envs, expected, 1)
    assert envs.call("add", 1) == (1, 101)
