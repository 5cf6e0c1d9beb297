"""Suites of other packages, and several suites in one environment."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from installed_packages import REACH_SUITE, install, write_metadata

from vla_gym.envs.registration import register_envs
from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.rollout import Info, RandomPolicy, Start, play
from vla_gym.rollout.film import film
from vla_gym.rollout.noise import ActionNoise
from vla_gym.rollout.workers import WatchGoals
from vla_gym.suites import get_suite, get_task, registry, suite_names
from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.evaluation.command import run_eval
from vla_gym_trainers.evaluation.config import EvalConfig

# The ball begins within 0.1 of the middle and drives 0.05 a control step.
LEFT, RIGHT = np.float32([-1, 0, 0]), np.float32([1, 0, 0])


@pytest.fixture
def reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package as installed: importable, and with its entry point's metadata."""
    install(tmp_path / "site", REACH_SUITE)
    points = {"vla_gym.suites": {"broken": "example_suite:XML"}}
    write_metadata(tmp_path / "site", "broken-suite", points)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path / "cache"))
    register_envs()
    yield
    sys.modules.pop("example_suite", None)
    registry._loaded.pop("reach", None)
    for env_id in [name for name in gym.registry if "reach" in name or "broken" in name]:
        del gym.registry[env_id]


def test_a_plug_in_is_played_by_gym_make(reach: None) -> None:
    assert suite_names()[-1] == "reach" and get_task("reach", 1).key == "reach_1"
    env = gym.make(
        "Libero-reach-v0", image_size=32, init_states="official", render_mode="rgb_array"
    )
    assert env.observation_space["above"].shape == (32, 32, 3)
    assert env.observation_space["proprio"].shape == (6,) and env.action_space.shape == (3,)
    assert env.metadata["render_fps"] == 10
    obs, info = env.reset(seed=3, options={"task_id": 0})
    assert info["init_state_id"] == 3 and obs["above"].max() > obs["above"].min()
    assert np.array_equal(env.render(), obs["above"])
    saved = pickle.dumps(env.unwrapped.get_state())
    terminated, steps = False, 0
    while not terminated:
        obs, reward, terminated, truncated, info = env.step(LEFT)
        steps += 1
    assert reward == 1.0 and 3 <= steps <= 9 and info["success"]
    assert env.unwrapped.set_state(pickle.loads(saved))["proprio"][3:].tolist() == [0, 0, 0]
    env.reset(options={"task_id": 0})
    for _ in range(30):
        *_, terminated, truncated, info = env.step(RIGHT)
    assert truncated and not terminated and info["elapsed_steps"] == 30
    with pytest.raises(ConfigError, match=r"init_state_id must be in 0\.\.4"):
        env.reset(options={"init_state_id": 5})
    env.close()


def test_a_plug_in_is_played_by_workers(reach: None) -> None:
    played = []
    for workers in (0, 2):
        envs = gym.make_vec(
            "Libero-reach-v0",
            num_envs=3,
            workers=workers,
            image_size=16,
            chunk_len=4,
            autoreset_mode="SAME_STEP",
        )
        assert envs.single_action_space.shape == (4, 3)
        obs, infos = envs.reset(seed=5)
        rows = [obs]
        ends = np.zeros(3, int)
        for _ in range(8):
            aim = np.where(obs["task_id"] == 0, -1.0, 1.0).astype(np.float32)
            actions = np.zeros((3, 4, 3), np.float32)
            actions[:, :, 0] = aim[:, None]
            obs, _, terminated, truncated, infos = envs.step(actions)
            ends += terminated
            assert not truncated.any()
            rows.append(obs)
        assert (ends >= 2).all()
        played.append(rows)
        envs.close()
    for here, there in zip(*played, strict=True):
        for key, array in here.items():
            assert np.array_equal(array, there[key]), key


class Reacher:
    """Drives straight to the mark."""

    name, expert, image_size, chunk_len = "reacher", False, 16, 4
    cameras: tuple[str, ...] = ()
    identity: dict[str, Any] = {"kind": "reacher"}  # noqa: RUF012

    def act(self, observations: Any, infos: Sequence[Info]) -> np.ndarray:
        assert observations["proprio"].shape == (len(infos), 6)
        aims = [LEFT if info["task_id"] == 0 else RIGHT for info in infos]
        return np.repeat(np.array(aims)[:, None], self.chunk_len, axis=1)


def test_a_plug_in_is_played_by_the_player(reach: None) -> None:
    states = range(get_suite("reach").num_init_states)
    starts = [Start("reach", task, state) for task in (0, 1) for state in states]
    episodes = sorted(play(Reacher(), starts, num_envs=3, workers=0), key=lambda e: e.start)
    assert [e.start for e in episodes] == starts
    assert all(e.success and e.terminated and 3 <= e.length <= 9 for e in episodes)
    lost = list(play(RandomPolicy(seed=1), starts[:2], num_envs=2, workers=0))
    assert all(e.truncated and not e.success and e.length == 30 for e in lost)


def test_a_plug_in_is_evaluated_on_all_its_states(reach: None) -> None:
    config = EvalConfig(
        policy="random", suite=("reach",), num_envs=2, workers=0, chunk_len=4, progress=False
    )
    card = run_eval(config)
    assert card["protocol"]["episodes"] == 5
    assert card["results"]["total"]["num_episodes"] == 10
    with pytest.raises(ConfigError, match=r"--episodes must be in 1\.\.5, got 6"):
        run_eval(EvalConfig(policy="random", suite=("reach",), episodes=6))


def test_what_only_liberos_own_suites_can_do_is_refused(reach: None) -> None:
    with pytest.raises(ConfigError, match="--confusion needs a suite .* got reach"):
        run_eval(EvalConfig(policy="random", suite=("reach",), confusion=True))
    start = [Start("reach", 0, 0)]  # beside a suite of LIBERO's
    (episode,) = play(RandomPolicy(), start, workers=0, env_wrappers=[WatchGoals])
    assert episode.achieved is None
    assert ActionNoise(0.0, np.random.default_rng(0))(LEFT).tolist() == [-1, 0, 0]
    with pytest.raises(ConfigError, match="7 numbers.*give noise 0"):
        ActionNoise(0.1, np.random.default_rng(0))(LEFT)


def test_films_of_suites_with_different_cameras(reach: None) -> None:
    starts = [Start("goal", 8, seed=1), Start("reach", 0, 0)]
    shapes = [
        (start, frames[0].shape)
        for episode, frames in film(RandomPolicy(), starts, size=64, max_control_steps=3)
        for start in [episode.start]
    ]
    cameras = [len(get_suite(start.suite).cameras) for start in starts]
    assert [start for start, _ in shapes] == starts
    assert [shape[1] for _, shape in shapes] == [64 * count for count in cameras]


def test_a_vla_of_another_robot_is_refused(reach: None) -> None:
    with pytest.raises(ConfigError, match=r"'mini' was trained .* 7 .* this environment"):
        gym.make("LiberoVLA-reach-v0")


def test_what_is_no_suite_is_one_clear_error(reach: None) -> None:
    with pytest.raises(ConfigError, match="is not the suite 'broken'"):
        get_suite("broken")
    with pytest.raises(ConfigError, match="they differ in cameras"):
        LiberoVectorEnv(2, ["goal", "reach"])
    with pytest.raises(ConfigError, match="named once"):
        get_suite("goal+goal")
    with pytest.raises(ConfigError, match="'reach' does not take settle_steps: leave"):
        gym.make("Libero-reach-v0", settle_steps=5)


def test_two_suites_in_one_vector_env() -> None:
    chosen = ["goal/8", "spatial/3"]
    options = {"suite": ["goal", "spatial"], "task_ids": chosen, "task_sampling": "round_robin"}
    envs = LiberoVectorEnv(2, workers=1, cameras=(), autoreset_mode="SAME_STEP", **options)
    assert envs.single_observation_space["task_id"].n == 20
    tasks = envs.get_attr("tasks")[0]
    assert [(t.suite, t.task_id) for t in tasks] == [("goal", 8), ("spatial", 3)]
    seen = []
    for _ in range(2):
        obs, infos = envs.reset(seed=7 if not seen else None)
        seen.append((obs["task_id"].tolist(), infos["suite"].tolist(), obs["proprio"]))
    envs.close()
    assert seen[0][:2] == ([8, 13], ["goal", "spatial"])
    assert seen[1][:2] == ([13, 8], ["spatial", "goal"])
    single = gym.make("Libero-v0", cameras=(), env_index=1, settle_steps=10, **options)
    for row in seen:
        obs, info = single.reset(seed=8 if row is seen[0] else None)
        assert (info["task_id"], info["suite"]) == (row[0][1], row[1][1])
        assert np.array_equal(obs["proprio"], row[2][1])
    state = single.unwrapped.get_state()
    assert (state.suite, state.task_id) == ("goal", 8)
    alone = gym.make("Libero-goal-v0", cameras=())
    obs = alone.unwrapped.set_state(state)
    assert obs["task_id"] == 8 and np.array_equal(obs["proprio"], seen[1][2][1])
    obs, info = single.reset(options={"task_id": 13, "init_state_id": 2})
    assert info["instruction"] == get_task("spatial", 3).instruction
    with pytest.raises(UnknownTaskError, match=r"suite 'goal\+spatial': expected 0\.\.19"):
        single.reset(options={"task_id": 20})
    for wrong in ("object/1", "goal/10", "goal", "8"):
        with pytest.raises(UnknownTaskError):
            LiberoVectorEnv(1, ["goal", "spatial"], task_ids=wrong)
    single.close()
    alone.close()
