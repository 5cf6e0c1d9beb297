"""Every task of every suite: it compiles, its official states fit, it runs without exploding."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import vla_gym  # noqa: F401 - registers the environments
from vla_gym.sim import LiberoSim
from vla_gym.suites import SUITES, VARIANTS, Task, get_task, suite_tasks
from vla_gym.suites.libero import TaskModel, load_task_model
from vla_gym.suites.libero.tasks import NUM_INIT_STATES, scene_of

SCENES = {task.scene_name: task for suite in reversed(SUITES) for task in suite_tasks(suite)}
ALL_SCENES = SCENES | {task.scene_name: task for s in VARIANTS for task in suite_tasks(s)}
CHUNKS, CHUNK_LEN = 20, 8
# No pose of an intact simulation is farther from the origin, in metres: what falls off the table
# lands on the floor beside it.
FAR = 8.0


def load(task: Task, assets: str | Path) -> TaskModel:
    model = load_task_model(task, assets)
    assert model.init_states.shape == (NUM_INIT_STATES, 1 + model.nq + model.nv)
    return model


def play(sim: LiberoSim, rng: np.random.Generator, chunks: int = CHUNKS) -> None:
    """Run random chunks: wandering ones that also press down into the scene."""
    for _ in range(chunks):
        drift = rng.uniform(-0.8, 0.8, 7) - [0, 0, 0.3, 0, 0, 0, 0]
        actions = drift + rng.normal(0, 0.3, (CHUNK_LEN, 7))
        sim.run_chunk(np.clip(actions, -1, 1))
        assert np.isfinite(sim.qpos).all() and np.isfinite(sim.qvel).all()


def check_intact(sim: LiberoSim, where: str) -> None:
    data = sim.data
    assert np.abs(data.xpos[1:]).max() < FAR, where
    # MuJoCo resets a simulation that becomes unstable, and counts it here.
    for kind in ("BADQPOS", "BADQVEL", "BADQACC"):
        number = data.warning[getattr(mujoco.mjtWarning, f"mjWARN_{kind}")].number
        assert number == 0, (where, kind, number)


def check_task(task: Task, assets: str | Path, states: int = 3, chunks: int = CHUNKS) -> None:
    model = load(task, assets)
    sim = LiberoSim(model)
    for state in range(states):
        where = f"{task.key}, official state {state}"
        sim.reset(model.official_layout(state))
        check_intact(sim, where)
        assert not sim.success(), where
        play(sim, np.random.default_rng(state), chunks)
        check_intact(sim, where)
    where = f"{task.key}, sampled layout"
    layout = model.sample_layout(np.random.default_rng(0))
    sim.reset(layout)
    check_intact(sim, where)
    assert not sim.success(), where
    assert max(sim.object_speeds().values()) < 0.1, where


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.parametrize("scene", ALL_SCENES)
def test_all_tasks_of_the_real_pack(libero_assets_dir: Path, scene: str) -> None:
    for task in scene_of(ALL_SCENES[scene])[1]:
        check_task(task, libero_assets_dir)


@pytest.mark.libero_assets
@pytest.mark.parametrize(("suite", "task_id"), [("spatial", 4), ("10", 3)])
def test_a_few_tasks_of_the_real_pack(libero_assets_dir: Path, suite: str, task_id: int) -> None:
    check_task(get_task(suite, task_id), libero_assets_dir, states=1, chunks=3)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_all_tasks_of_the_lite_pack(scene: str) -> None:
    for task in scene_of(SCENES[scene])[1]:
        check_task(task, "lite")


@pytest.mark.parametrize(
    ("suite", "task_id"),
    [("goal", 8), ("spatial", 4), ("object", 7), ("10", 5), ("90", 34)],
)
def test_a_few_tasks_of_the_lite_pack(suite: str, task_id: int) -> None:
    check_task(get_task(suite, task_id), "lite", states=1, chunks=3)


@pytest.mark.parametrize(("suite", "task_id"), [("spatial", 5), ("object", 7), ("90", 34)])
def test_the_embedded_vla_plays_suites_that_it_has_not_learned(suite: str, task_id: int) -> None:
    env = gym.make(f"LiberoVLA-{suite}-v0", task_ids=task_id, max_control_steps=16)
    obs, info = env.reset(seed=0)
    assert info["instruction"] == get_task(suite, task_id).instruction
    truncated = False
    for _ in range(2):
        assert env.observation_space.contains(obs)
        obs, _, _, truncated, info = env.step(obs["vla_action"])
    assert truncated and info["elapsed_steps"] == 16
    env.close()


def test_all_tasks_have_a_scene() -> None:
    assert len(SCENES) == 32
    played = [task for scene in SCENES.values() for task in scene_of(scene)[1]]
    assert len(played) == len(set(played)) == 130
    for task in played:
        assert scene_of(task)[0] == task.scene_name
