"""What a newcomer runs into: unknown arguments, render without a mode, pickles and copies."""

import copy
import functools
import pickle
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import FlattenObservation
from trees import assert_same

import vla_gym  # noqa: F401
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, RenderError, VlaGymError
from vla_gym.vector import LiberoVectorEnv

ONE = {"num_envs": 1, "workers": 0}
VLA = {"vla": "mini-few", "rl_token": None}


@pytest.mark.parametrize(
    ("make", "wrong", "hint"),
    [
        (functools.partial(gym.make, "Libero-goal-v0"), "image_siz", "image_size"),
        (functools.partial(gym.make, "LiberoVLA-goal-v0", **VLA), "keep_image", "keep_images"),
        (functools.partial(gym.make_vec, "Libero-goal-v0", **ONE), "worker", "workers"),
        (functools.partial(gym.make_vec, "LiberoVLA-goal-v0", **ONE, **VLA), "strid", "stride"),
        (functools.partial(gym.make_vec, "Libero-v0", **ONE, suite="goal"), "task_id", "task_ids"),
        (functools.partial(LiberoVectorEnv, 1, "goal", workers=0), "wrappers", "env_wrappers"),
    ],
)
def test_unknown_arguments_are_told_the_valid_ones(make, wrong, hint):
    with pytest.raises(ConfigError) as told:
        make(**{wrong: 1})
    text = str(told.value)
    assert text.startswith(f"Unknown argument {wrong!r}. Did you mean {hint}")
    assert f"Valid ones: {hint}" in text and "scene_cache_size" in text


def test_an_argument_that_resembles_nothing():
    with pytest.raises(ConfigError, match=r"^Unknown argument 'xyzzy'\. Valid ones: assets, "):
        gym.make("Libero-goal-v0", xyzzy=1)


def test_a_flattened_environment_under_a_vla_is_told_of_flat():
    with pytest.raises(ConfigError, match="flat=True"):
        gym.make_vec("LiberoVLA-goal-v0", **ONE, **VLA, env_wrappers=[FlattenObservation])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"wrap_envs": lambda _: None}, "wrap_envs must return environments, got None"),
        ({"env_wrappers": [lambda _: None]}, "env_wrappers must return environments, got None"),
        ({"device": "nonsense"}, "torch device 'nonsense' is not there"),
        ({"keep_images": np.zeros((2, 2))}, "keep_images must be True or False"),
        ({"copy": "no"}, "copy must be True or False"),
        ({"settle_steps": 2**31}, r"settle_steps must be in 0\.\.10000"),
        ({"vla": Path("/nowhere")}, "nowhere"),
    ],
)
def test_wrong_arguments_of_a_vla_are_one_error(wrong, message):
    with pytest.raises(VlaGymError, match=message):
        gym.make_vec("LiberoVLA-goal-v0", **{**ONE, **VLA, **wrong})


@pytest.mark.parametrize("env_id", ["Libero-goal-v0", "LiberoVLA-goal-v0"])
def test_an_unknown_render_mode_is_told_all_of_them(env_id):
    with pytest.raises(ConfigError, match="None, 'rgb_array', 'human'; got 'ansi'"):
        gym.make(env_id, render_mode="ansi")


def test_a_window_without_pygame_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(RenderError, match=r"pip install 'vla-gym\[window\]'"):
        gym.make("Libero-goal-v0", render_mode="human")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": 1}, "expected 'task_id', 'init_state_id', and .* 'reset_mask'"),
        ({"task_id": [8]}, "task_id must be one number, or one for each of the 2 environments"),
    ],
)
def test_wrong_reset_options_of_many_are_told_the_valid_ones(options, message):
    envs = LiberoVectorEnv(2, "goal", workers=0, cameras=())
    with pytest.raises(ConfigError, match=message):
        envs.reset(options=options)
    envs.close()


def test_render_without_a_mode_says_so():
    envs = LiberoVectorEnv(2, "goal", workers=0, cameras=())
    with pytest.warns(UserWarning, match="render_mode='rgb_array'"):
        assert envs.render() == (None, None)
    envs.close()


ACTIONS = np.random.default_rng(0).uniform(-1, 1, (6, 7)).astype(np.float32)


def play(env, actions):
    return [env.step(action) for action in actions]


def through_pickle(env):
    return pickle.loads(pickle.dumps(env))


@pytest.mark.parametrize(("twin", "variation"), [(through_pickle, "strong"), (copy.deepcopy, None)])
def test_a_pickled_environment_goes_on_with_its_episode_and_the_next(twin, variation):
    env = LiberoEnv("goal", task_ids=[7, 8], image_size=32, variation=variation)
    env.reset(seed=3)
    env.step(ACTIONS[0])
    other = twin(env)
    assert other._sim is not None and other.sim.data is not env.sim.data
    assert_same(play(other, ACTIONS[1:]), play(env, ACTIONS[1:]))
    assert_same(other.reset(), env.reset())
    env.close()
    other.close()


def test_an_environment_that_was_never_reset_can_be_pickled():
    env = LiberoEnv("goal", task_ids=8, image_size=32)
    other = through_pickle(env)
    assert_same(other.reset(seed=1), env.reset(seed=1))
    with pytest.raises(gym.error.ResetNeeded):
        through_pickle(LiberoEnv("goal")).step(ACTIONS[0])


def test_an_environment_with_a_vla_can_be_pickled():
    env = gym.make("LiberoVLA-goal-v0", task_ids=8, **VLA)
    obs, _ = env.reset(seed=0)
    env.step(obs["vla_action"])
    other = through_pickle(env)
    assert_same(other.step(obs["vla_action"]), env.step(obs["vla_action"]))


def test_a_vector_environment_says_why_it_cannot_be_pickled():
    envs = LiberoVectorEnv(1, "goal", workers=0, cameras=())
    for twin in (through_pickle, copy.deepcopy):
        with pytest.raises(TypeError, match="its workers belong to this process"):
            twin(envs)
    envs.close()
