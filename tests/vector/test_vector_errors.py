"""What an error of one environment leaves behind: nothing, and the others where they were."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from stub_envs import LIMIT, Fault, StubEnv

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.wrappers.vector import History

ACTIONS = np.zeros((4, 3), np.float32)


@pytest.fixture
def make(make_vec: Any) -> Any:
    return partial(make_vec, script=[(9, LIMIT)])


def seeds_of(obs: dict[str, np.ndarray]) -> list[float]:
    return obs["proprio"][:, 0].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_options_of_a_failed_reset_are_forgotten(make: Any, workers: int, once: Any) -> None:
    firsts = (0, 2)[: max(workers, 1)]  # of each worker
    fails = {i: {"faults": [once("error", "reset", episode=1)]} for i in firsts}
    envs = make(4, fails, workers=workers)
    envs.reset(seed=1)
    with pytest.raises(ConfigError, match="stub error in reset"):
        envs.reset(options={"init_state_id": 9})
    _, infos = envs.reset()  # of all workers, though each of them failed
    assert infos["init_state_id"].tolist() == [-1] * 4
    assert seeds_of(envs.reset(seed=5)[0]) == [5.0, 6.0, 7.0, 8.0]
    envs.step(ACTIONS)


def test_a_second_error_does_not_keep_the_first_one_under_way(make: Any) -> None:
    error = [Fault("error")]
    fails = {0: {"faults": error}, 2: {"faults": error, "delay": 0.3}}
    envs = make(4, fails, workers=2)
    envs.reset(seed=1)
    with pytest.raises(ConfigError, match="stub error in step"):  # the other one 0.3 s later
        envs.step(ACTIONS)
    assert seeds_of(envs.reset(seed=3)[0]) == [3.0, 4.0, 5.0, 6.0]


def test_a_timeout_inside_an_environment_is_an_error_like_others(make: Any) -> None:
    class Late(StubEnv):
        def step(self, *_: Any) -> Any:
            raise TimeoutError("no answer from elsewhere")

    envs = make(2, Late, workers=0)
    envs.reset(seed=1)
    with pytest.raises(TimeoutError, match="elsewhere"):
        envs.step(ACTIONS[:2])
    assert seeds_of(envs.reset(seed=3)[0]) == [3.0, 4.0]


def test_what_others_have_done_is_received_after_an_error(make: Any) -> None:
    envs = make(2, {1: {"faults": [Fault("error")]}}, workers=2)
    envs.reset(seed=1)
    envs.send(ACTIONS[:2], [0, 1])
    time.sleep(0.3)
    with pytest.raises(ConfigError, match="stub error in step"):
        envs.recv(timeout=20)
    obs, *_, infos = envs.recv(timeout=20)
    assert infos["env_id"].tolist() == [0] and obs["proprio"][0, 2] == 1.0


def test_a_first_reset_of_some_seeds_all(make: Any) -> None:
    envs = make(4, workers=0)
    envs.reset(seed=100, options={"reset_mask": np.array([True, False, False, False])})
    assert seeds_of(envs.step(ACTIONS)[0]) == [100.0, 101.0, 102.0, 103.0]
    envs = make(4, workers=0)
    envs.reset_send([0, 1])
    envs.reset_send([2, 3])
    seeds = seeds_of(envs.recv()[0])
    np.testing.assert_allclose(np.diff(seeds), 1, atol=256)  # of float32
    assert min(seeds) > 0
    states = envs.get_state([0])
    envs = make(2, workers=0)
    envs.set_state(states, [1])
    found = seeds_of(envs.step(ACTIONS[:2])[0])
    assert found[0] > 0 and found[1] == seeds[0]


@pytest.mark.parametrize("name", ["get_state", "set_state", "seek"])
def test_calls_do_not_go_past_the_vector_environment(make: Any, name: str) -> None:
    envs = make(1, workers=0)
    envs.reset(seed=1)
    with pytest.raises(ConfigError, match="go past"):
        envs.call(name)


def test_the_state_of_a_dead_worker_begins_an_episode_without_a_history(make: Any) -> None:
    envs = History(make(1, workers=1), length=3, frames=("image",))
    envs.reset(seed=5)
    for _ in range(4):
        envs.step(ACTIONS[:1] + 0.5)
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    time.sleep(0.3)
    with pytest.warns(WorkerRestartWarning):
        states = envs.get_state()
    obs = envs.set_state(states)
    assert obs["proprio"][0].tolist() == [5.0, 1.0, 0.0, 0.0]
    assert not obs["history_mask"].any() and not obs["action_history"].any()
    assert (obs["image_history"] == obs["image"][:, None]).all()  # no frame of the old one
