"""The single environment: Gymnasium's contract, episodes, seeds and errors."""

from __future__ import annotations

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import vla_gym
from vla_gym.assets import resolve_asset_pack
from vla_gym.envs.checks import MAX_SEED
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, InvalidActionError, UnknownTaskError

BOWL_ON_PLATE = 8
SMALL = {"image_size": 32}


@pytest.fixture(scope="module")
def env():
    env = gym.make("Libero-goal-v0", task_ids=BOWL_ON_PLATE, gamma=0.99, **SMALL)
    yield env
    env.close()


def equal(a: dict, b: dict) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a)


def test_gymnasium_check_env(env):
    check_env(env.unwrapped, skip_render_check=True)


def test_sb3_check_env(env):
    sb3_check_env(env.unwrapped, warn=True)


def test_seed_fixes_all_following_episodes_and_others_differ(env):
    first = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    again = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    assert not equal(first[0], first[1])
    assert not equal(first[0], env.reset(seed=6)[0])


def test_step_limit_truncates_and_never_terminates():
    limit = np.int64(5)
    env = LiberoEnv("goal", task_ids=8, max_control_steps=limit, chunk_len=3, gamma=0.9, **SMALL)
    env.reset(seed=0)
    stay = np.tile(np.array([0, 0, 0, 0, 0, 0, -1], np.float32), (3, 1))
    *_, terminated, truncated, info = env.step(stay)
    assert (terminated, truncated, info["executed_steps"]) == (False, False, 3)
    assert info["discount"] == pytest.approx(0.9**3)
    _, reward, terminated, truncated, info = env.step(stay)
    assert (terminated, truncated, info["executed_steps"]) == (False, True, 2)
    assert type(truncated) is bool
    assert (reward, info["elapsed_steps"], info["success"]) == (0.0, 5, False)
    assert info["discount"] == pytest.approx(0.9**2)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(stay)
    env.close()


@pytest.mark.parametrize("init_states", [(4, 49, 4), [4, 49, 4], np.array([4, 49, 4])])
def test_chosen_official_states_in_turn(init_states):
    env = LiberoEnv("goal", task_ids=8, init_states=init_states, cameras=())
    assert env.init_states == (4, 49, 4)
    ids = [env.reset(seed=7 if i == 0 else None)[1]["init_state_id"] for i in range(5)]
    assert ids == [49, 4, 4, 49, 4]
    assert env.reset(options={"init_state_id": 7})[1]["init_state_id"] == 7


@pytest.mark.parametrize(
    ("init_states", "message"),
    [
        ("random", "'sampled', 'official' or a sequence of official states, 0..49; got 'random'"),
        (3, "got 3"),
        ({1, 2}, "sequence"),
        ([], "at least one"),
        ([0, 50], "0..49, got 50"),
        ([-1], "0..49, got -1"),
        ([1.0], "must be an integer"),
        ([True], "must be an integer"),
        ("0", "got '0'"),
    ],
)
def test_wrong_init_states(init_states, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LiberoEnv("goal", init_states=init_states)


def test_sampled_layouts_share_nothing_with_the_official_states():
    env = LiberoEnv("goal", task_ids=8, cameras=())
    env.reset(seed=0)
    model, rng = env.task_model, np.random.default_rng(0)
    official = model.init_states[:, 1 : 1 + model.nq]
    drawn = [*model.robot.joint_qpos, *(a for a in model.free_qpos.values())]
    for _ in range(50):
        layout = model.sample_layout(rng)
        assert layout.init_state_id == -1
        assert not (official[:, drawn] == layout.qpos[drawn]).any()
    assert env.reset()[1]["init_state_id"] == -1


@pytest.mark.parametrize("task_ids", [np.array([8, 7]), (np.int64(8), 7), range(8, 6, -1)])
def test_task_lists_of_any_kind_and_repeated_tasks(task_ids):
    assert LiberoEnv("goal", task_ids=task_ids, cameras=()).schedule.task_ids == (8, 7)
    assert LiberoEnv("goal", task_ids=np.int32(7), cameras=()).schedule.task_ids == (7,)
    env = LiberoEnv("goal", task_ids=[7, 7, 8], task_sampling="round_robin", cameras=())
    drawn = [env.reset(seed=0 if i == 0 else None)[1]["task_id"] for i in range(6)]
    assert drawn == [7, 7, 8, 7, 7, 8]
    assert [task.task_id for task in env.tasks] == [7, 7, 8]


def test_options_hold_for_one_episode_and_change_no_other():
    env, plain = (LiberoEnv("goal", cameras=()) for _ in range(2))
    expected = [plain.reset(seed=2 if i == 0 else None) for i in range(3)]
    env.reset(seed=2, options={"task_id": np.int64(0), "init_state_id": np.uint8(3)})
    assert (env.task_model.task.task_id, env.get_state().init_state_id) == (0, 3)
    with pytest.raises(UnknownTaskError):
        env.reset(options={"task_id": 10})
    wrong_states = [{"init_state_id": number} for number in (50, -1, 1.0, True)]
    for wrong in (*wrong_states, {"task_id": "7"}, {"task_id": np.array([7, 8])}, {"task": 1}):
        with pytest.raises(ConfigError):
            env.reset(options=wrong)
    assert equal(env.reset(options={"task_id": None, "init_state_id": None})[0], expected[1][0])
    obs, info = env.reset()
    assert equal(obs, expected[2][0]) and info == expected[2][1]


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"suite": "gaol"}, UnknownTaskError, "expected one of goal"),
        ({"task_ids": 10}, UnknownTaskError, "0..9"),
        ({"task_ids": [0, -1]}, UnknownTaskError, "out of range"),
        ({"physics": "slow"}, ConfigError, "'fast', 'exact'"),
        ({"chunk_len": 0}, ConfigError, "chunk_len must be in 1..1000"),
        ({"chunk_len": 10**8}, ConfigError, "chunk_len must be in 1..1000"),
        ({"gamma": 1.5}, ConfigError, "gamma"),
        ({"cameras": ("front",)}, ConfigError, "agentview"),
        ({"cameras": ["wrist"] * 2}, ConfigError, r"got \['wrist', 'wrist'\]"),
        ({"task_ids": []}, ConfigError, "number of task_ids"),
        ({"task_ids": [[0, 1]]}, UnknownTaskError, "must be an integer"),
        ({"chunk_len": 2.5}, ConfigError, "chunk_len must be an integer"),
        ({"image_size": 5000}, ConfigError, "image_size must be in 1..4096"),
        ({"max_control_steps": 0}, ConfigError, "max_control_steps must be in 1"),
        ({"scene_cache_size": 0}, ConfigError, "scene_cache_size"),
    ],
)
def test_wrong_arguments_give_one_clear_error(kwargs, error, text):
    with pytest.raises(error, match=text):
        LiberoEnv(**{"suite": "goal", **kwargs})


def test_assets_at_a_relative_path_are_found_wherever_the_process_goes(tmp_path, monkeypatch):
    (tmp_path / "pack").symlink_to(resolve_asset_pack("lite").root)
    monkeypatch.chdir(tmp_path)
    env = LiberoEnv("goal", task_ids=8, assets="pack", cameras=())
    monkeypatch.chdir("/")
    env.reset(seed=0)
    env.close()


def test_no_simulation_before_the_first_reset_or_after_close():
    env = LiberoEnv("goal", cameras=())
    for _ in range(2):
        with pytest.raises(ResetNeeded, match=r"after close\(\): call reset\(\) first"):
            env.sim.proprio()
        env.reset(seed=0)
        env.close()


@pytest.mark.parametrize("reward", ["sparse", "staged"])
def test_a_chunk_is_refused_whole_even_past_the_step_limit(reward):
    env = LiberoEnv("goal", chunk_len=4, cameras=(), max_control_steps=2, reward=reward)
    env.reset(seed=0)
    action = np.zeros((4, 7), np.float32)
    action[3] = np.nan
    with pytest.raises(InvalidActionError, match="must be finite"):
        env.step(action)
    env.close()


def test_the_largest_seed_of_a_vector_environment_and_what_is_none():
    env = LiberoEnv("goal", cameras=(), env_index=1)
    env.reset(seed=MAX_SEED + 1)
    for seed in (2**63, 2**200, -1, 0.5, True):
        with pytest.raises(ConfigError, match="seed must be"):
            env.reset(seed=seed)
    env.close()


@pytest.mark.parametrize(
    "action",
    [
        np.zeros(7, complex),
        [0, 0, 0, 0, 0, 0, [1, 2]],
        {"a": 1},
        np.full(7, np.nan),
        np.zeros(6),
        np.zeros((1, 7)),
        torch.zeros(7, requires_grad=True),
    ],
    ids=["complex", "ragged", "no array", "not finite", "too few", "a chunk", "with a gradient"],
)
def test_a_bad_action_is_refused_before_anything_moves(env, action):
    base = env.unwrapped
    base.reset(seed=0)
    before = base.sim.qpos.copy()
    for step in (base.step, base.sim.step):
        with pytest.raises(InvalidActionError):
            step(action)
    np.testing.assert_array_equal(base.sim.qpos, before)


def test_ids_are_registered_once():
    before = dict(gym.registry)
    vla_gym.register_envs()
    assert dict(gym.registry) == before
