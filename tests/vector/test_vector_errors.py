"""What an error of one environment leaves behind: nothing, and the others where they were."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.vector import LiberoVectorEnv
from vla_gym.wrappers.vector import History


def make(num_envs: int, **settings: Any) -> LiberoVectorEnv:
    """Make environments that observe (seed, episode, step, level) and fail as they are told."""

    class Told(gym.Env[Any, Any]):
        observation_space = spaces.Dict(
            x=spaces.Box(-np.inf, np.inf, (4,), np.float32),
            wrist=spaces.Box(0, 255, (1, 1, 3), np.uint8),
        )
        action_space = spaces.Box(-1, 1, (1,), np.float32)
        key, t, level = (0, 0), 0, 0

        def __init__(self, index: int) -> None:
            self.index = index

        def observe(self) -> dict[str, Any]:
            seed, episode = self.key
            frame = np.array([[[0, episode, self.t % 256]]], np.uint8)
            return {"x": np.array([seed, episode, self.t, self.level], np.float32), "wrist": frame}

        def seek(self, seed: int, episode: int, env_index: Any = None) -> None:
            del env_index
            self.key = (seed, episode - 1)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.level = (options or {}).get("level", 0)
            if self.level > 3:
                raise ConfigError(f"level {self.level}")
            self.key, self.t = (
                ((seed, 0) if seed is not None else (self.key[0], self.key[1] + 1)),
                0,
            )
            return self.observe(), {"elapsed_steps": 0, "executed_steps": 0}

        def step(self, action: Any) -> Any:
            if action[0] == 1:
                time.sleep(0.3 * (self.index > 1))
                raise ConfigError(f"step of {self.index}")
            self.t += 1
            infos = {"elapsed_steps": self.t, "executed_steps": 1}
            return self.observe(), 0.0, False, False, infos

        def get_state(self) -> Any:
            return self.key, self.t

        def set_state(self, state: Any) -> Any:
            self.key, self.t = state
            return self.observe()

    return LiberoVectorEnv(num_envs, env_factory=Told, **settings)


def actions(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


@pytest.mark.parametrize("workers", [0, 2])
def test_options_of_a_failed_reset_are_forgotten(workers: int) -> None:
    with closing(make(4, workers=workers)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ConfigError, match="level 9"):
            envs.reset(options={"level": 9})
        obs, _ = envs.reset()  # of all workers, though each of them failed
        assert obs["x"][:, 3].tolist() == [0.0] * 4
        assert envs.reset(seed=5)[0]["x"][:, 0].tolist() == [5.0, 6.0, 7.0, 8.0]
        envs.step(np.zeros((4, 1), np.float32))


def test_a_second_error_does_not_keep_the_first_one_under_way() -> None:
    with closing(make(4, workers=2)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ConfigError, match="step of 0"):  # the other worker fails 0.3 s later
            envs.step(actions(1, 1, 1, 1))
        assert envs.reset(seed=3)[0]["x"][:, 0].tolist() == [3.0, 4.0, 5.0, 6.0]


def test_what_others_have_done_is_received_after_an_error() -> None:
    with closing(make(2, workers=2)) as envs:
        envs.reset(seed=1)
        envs.send(actions(0, 1), [0, 1])
        time.sleep(0.3)
        with pytest.raises(ConfigError, match="step of 1"):
            envs.recv(timeout=20)
        obs, *_, infos = envs.recv(timeout=20)
        assert infos["env_id"].tolist() == [0] and obs["x"][0, 2] == 1.0


def test_a_first_reset_of_some_seeds_all() -> None:
    with closing(make(4, workers=0)) as envs:
        envs.reset(seed=100, options={"reset_mask": np.array([True, False, False, False])})
        obs, *_ = envs.step(np.zeros((4, 1), np.float32))
        assert obs["x"][:, 0].tolist() == [100.0, 101.0, 102.0, 103.0]
    with closing(make(4, workers=0)) as envs:
        envs.reset_send([0, 1])
        envs.reset_send([2, 3])
        seeds = envs.recv()[0]["x"][:, 0]
        np.testing.assert_allclose(np.diff(seeds), 1, atol=256)  # of float32
        assert seeds.min() > 0
        states = envs.get_state([0])
    with closing(make(2, workers=0)) as envs:
        envs.set_state(states, [1])
        obs, *_ = envs.step(np.zeros((2, 1), np.float32))
        assert obs["x"][0, 0] > 0 and obs["x"][1, 0] == seeds[0]


@pytest.mark.parametrize("name", ["get_state", "set_state", "seek"])
def test_calls_do_not_go_past_the_vector_environment(name: str) -> None:
    with closing(make(1, workers=0)) as envs, pytest.raises(ConfigError, match="go past"):
        envs.reset(seed=1)
        envs.call(name)


def test_the_state_of_a_dead_worker_begins_an_episode_without_a_history() -> None:
    with closing(History(make(1, workers=1), length=3)) as envs:
        envs.reset(seed=5)
        for _ in range(4):
            envs.step(actions(0.5))
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        time.sleep(0.3)
        with pytest.warns(WorkerRestartWarning):
            states = envs.get_state()
        obs = envs.set_state(states)
        assert obs["x"][0].tolist() == [5.0, 1.0, 0.0, 0.0]
        assert not obs["history_mask"].any() and not obs["action_history"].any()
        assert (obs["wrist_history"] == obs["wrist"][:, None]).all()  # no frame of the old one
