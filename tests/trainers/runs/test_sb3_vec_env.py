"""The SB3 adapter against SB3's own DummyVecEnv, and SB3's algorithms on it."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from toy_env import ToyReach
from trees import assert_same

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym_trainers.runs.sb3_vec_env import make_sb3_vec_env, sb3_vec_env

pytestmark = pytest.mark.usefixtures("warm_server")

SAME_STEP = AutoresetMode.SAME_STEP


class Toy(ToyReach):
    """Some end by success (and call that truncated too), others at the limit of three chunks."""

    def __init__(self) -> None:
        super().__init__(max_control_steps=12)
        self.options: Any = None
        self.number = 0

    def reset(self, *, seed=None, options=None):
        self.options = options
        result = super().reset(seed=seed, options=options)
        self.goal = self.position + self.np_random.uniform(0.2, 0.9)
        self.number += 1
        return self._observe(), result[1] | {"number": self.number}

    def step(self, action):
        obs, reward, success, truncated, info = super().step(action)
        return obs, reward, success, truncated or success, info

    def render(self):
        return np.full((2, 2, 3), 100 * self.position[0], np.uint8)


def make_toy(num_envs: int = 3, env: Any = Toy, **kwargs: Any):
    return sb3_vec_env(SyncVectorEnv([env] * num_envs, autoreset_mode=SAME_STEP, **kwargs))


def without_times(infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    infos = [dict(info) for info in infos]
    for info in infos:
        if "episode" in info:
            info["episode"] = {key: info["episode"][key] for key in ("r", "l")}
    return infos


def test_equals_dummy_vec_env_with_monitors():
    """Observations, rewards, flags and infos of many episodes, in values and types."""
    ours, theirs = make_toy(), DummyVecEnv([lambda: Monitor(Toy())] * 3)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.seed(4) == theirs.seed(4) == [4, 5, 6]
    assert_same(ours.reset(), dict(theirs.reset()))
    assert_same(ours.reset_infos, theirs.reset_infos)
    ends = {"success": 0, "limit": 0}
    for _ in range(40):
        actions = np.ones((3, 4, 7), np.float32)
        a, b = ours.step(actions), theirs.step(actions)
        assert_same(a[:3], (dict(b[0]), *b[1:3]))
        # A scalar of the observation comes as an array, as SB3 stores it.
        for info in b[3]:
            if "terminal_observation" in info:
                final = info["terminal_observation"]
                info["terminal_observation"] = {k: np.asarray(v) for k, v in final.items()}
        assert_same(without_times(a[3]), without_times(b[3]))
        assert_same(ours.reset_infos, theirs.reset_infos)
        for info, done in zip(a[3], a[2], strict=True):
            assert ("episode" in info) == done
            if done:
                ends["limit" if info["TimeLimit.truncated"] else "success"] += 1
    assert min(ends.values()) > 5


def test_refuses_other_autoreset_modes():
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        with pytest.raises(ConfigError, match="SAME_STEP"):
            sb3_vec_env(SyncVectorEnv([Toy], autoreset_mode=mode))


def test_observations_are_the_callers_own():
    env = make_toy(copy=False)
    first = env.reset()
    kept = {key: value.copy() for key, value in first.items()}
    actions = np.ones((3, 4, 7), np.float32)
    second, _, dones, infos = env.step(actions)
    second_kept = {key: value.copy() for key, value in second.items()}
    while not dones.any():
        _, _, dones, infos = env.step(actions)
    final = infos[int(np.argmax(dones))]["terminal_observation"]
    final_kept = {key: value.copy() for key, value in final.items()}
    for _ in range(4):
        env.step(actions)
    assert_same(first, kept)
    assert_same(second, second_kept)
    assert_same(final, final_kept)


def test_attributes_and_methods_of_some_environments():
    env = make_toy(env=lambda: gym.wrappers.RecordEpisodeStatistics(Toy()))
    env.reset()
    env.set_attr("max_control_steps", 5, indices=[0, 2])
    assert env.get_attr("max_control_steps") == [5, 12, 5]
    assert env.get_attr("max_control_steps", indices=1) == [12]
    env.env_method("set_wrapper_attr", "gamma", 0.5, indices=2)
    assert env.get_attr("gamma") == [0.98, 0.98, 0.5]
    assert env.has_attr("gamma") and not env.has_attr("nothing")
    assert env.env_is_wrapped(gym.wrappers.RecordEpisodeStatistics) == [True] * 3
    assert env.env_is_wrapped(gym.wrappers.TimeLimit, indices=[1]) == [False]
    assert env.env_is_wrapped(Monitor, indices=[0, 1]) == [True] * 2


def test_seeds_and_options_are_used_once():
    env = make_toy()
    env.seed(3)
    env.set_options({"a": 1})
    first = env.reset()
    assert env.get_attr("options") == [{"a": 1}] * 3
    second = env.reset()
    assert env.get_attr("options") == [None] * 3
    assert (first["proprio"] != second["proprio"]).any()
    env.seed(3)
    assert_same(env.reset(), first)


def test_renders_a_tiled_image():
    class Drawing(Toy):
        render_mode = "rgb_array"

    env = make_toy(num_envs=4, env=Drawing)
    env.reset()
    assert env.render_mode == "rgb_array" and len(env.get_images()) == 4
    assert env.render().shape == (4, 4, 3)
    with pytest.warns(UserWarning, match="rgb_array"):
        assert make_toy(num_envs=2).get_images() == [None, None]


def make_libero(num_envs: int = 2, **kwargs: Any):
    defaults: dict[str, Any] = {"workers": 2, "task_ids": [2, 8], "gamma": 0.99}
    return make_sb3_vec_env("LiberoVLA-goal-v0", num_envs, **defaults | kwargs)


def test_libero_behind_the_adapter():
    """One end of an episode, and calls to some environments only."""
    env = make_libero(3, max_control_steps=16, seed=5)
    obs = env.reset()
    assert env.observation_space.contains({key: value[1] for key, value in obs.items()})
    assert [info["elapsed_steps"] for info in env.reset_infos] == [0, 0, 0]
    for step in range(2):
        obs, rewards, dones, infos = env.step(obs["vla_action"])
        assert rewards.dtype == np.float32 and dones.tolist() == [step == 1] * 3
    for info, next_info in zip(infos, env.reset_infos, strict=True):
        assert info["elapsed_steps"] == 16 and info["is_success"] is False
        assert info["TimeLimit.truncated"] and type(info["instruction"]) is str
        assert info["discount"] == pytest.approx(0.99**8)
        assert info["episode"]["l"] == 2 and info["episode_stats"]["length"] == 16
        assert next_info["elapsed_steps"] == 0
        final = {key: value[()] for key, value in info["terminal_observation"].items()}
        assert env.observation_space.contains(final)
    env.set_attr("max_control_steps", 8, indices=[2])
    assert env.get_attr("max_control_steps") == [16, 16, 8]
    *_, dones, infos = env.step(obs["vla_action"])
    assert dones.tolist() == [False, False, True]
    assert env.env_is_wrapped(gym.wrappers.TimeLimit) == [False] * 3
    env.set_options({"task_id": np.array([2, 2, 2])})
    env.reset()
    assert [info["task_id"] for info in env.reset_infos] == [2, 2, 2]
    env.set_options([{"other": 1}, {}, {}])
    with pytest.raises(ConfigError, match="the same reset option 'other'"):
        env.reset()
    env.set_options([{"task_id": 2}, {"task_id": 8, "init_state_id": 7}, {"task_id": 2}])
    last = env.reset()
    assert [info["task_id"] for info in env.reset_infos] == [2, 8, 2]
    assert [info["init_state_id"] for info in env.reset_infos] == [-1, 7, -1]
    victim = int(env.vector_env.worker_of[2])
    os.kill(env.vector_env.worker_pids[victim], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        _, rewards, dones, infos = env.step(obs["vla_action"])
    of_victim = env.vector_env.worker_of == victim
    assert 0 < of_victim.sum() < 3 and (dones == of_victim).all() and not rewards.any()
    for i, (info, died) in enumerate(zip(infos, of_victim, strict=True)):
        assert info["TimeLimit.truncated"] == info.get("worker_restarted", False) == died
        assert "episode" not in info  # not an episode to be counted
        if died:
            final = info["terminal_observation"]
            np.testing.assert_array_equal(final["proprio"], last["proprio"][i])
    env.close()


def test_what_hides_the_chunks_length_is_refused_with_a_stride():
    for hidden in ({"flat": True}, {"obs_keys": ("rl_token", "proprio")}):
        with pytest.raises(ConfigError, match="as long as the chunk that is observed"):
            make_libero(workers=0, stride=2, **hidden)


def test_sb3s_normalizer_monitor_and_evaluation_go_around_it(tmp_path) -> None:
    def wrapped(**kwargs: Any) -> VecNormalize:
        with pytest.warns(UserWarning, match="already wrapped"):
            monitored = VecMonitor(make_toy())
        return VecNormalize(monitored, norm_obs_keys=["rl_token", "proprio"], **kwargs)

    env, seen = wrapped(), wrapped(training=False)
    often = {"n_eval_episodes": 4, "eval_freq": 20, "log_path": str(tmp_path)}
    callback = EvalCallback(seen, verbose=0, **often)
    settings: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 2, "device": "cpu"}
    model = PPO("MultiInputPolicy", env, gamma=0.92, seed=0, **settings)
    model.learn(120, callback=callback)
    results = np.load(tmp_path / "evaluations.npz")
    assert results["timesteps"].tolist() == [60, 120] and results["results"].shape == (2, 4)
    assert all(torch.isfinite(p).all() for p in model.policy.parameters())
    assert np.abs(env.obs_rms["rl_token"].mean).max() > 0
