"""Every task of every suite: it compiles, its official states fit and rest, it does not explode."""

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
STATES = (0, 17, 34)
# Here LIBERO's placement puts a bowl into the rim of a plate: they push each other apart, by 3 cm
# on the real pack and by 37 cm on the lite one.
OVERLAPPING = {("spatial", 2, 17)}
# No pose of an intact simulation is farther from the origin, in metres: what falls off the table
# lands on the floor beside it.
FAR = 8.0


def load(task: Task, assets: str | Path) -> TaskModel:
    model = load_task_model(task, assets)
    assert model.init_states.shape == (NUM_INIT_STATES, 1 + model.nq + model.nv)
    return model


def states_of(task: Task, count: int = len(STATES)) -> list[int]:
    return [i for i in STATES[:count] if (task.suite, task.task_id, i) not in OVERLAPPING]


def positions(sim: LiberoSim) -> dict[str, np.ndarray]:
    objects = sim.task_model.objects.values()
    return {spec.body: sim.body_pos(spec.body) for spec in objects if not spec.is_fixture}


def play(sim: LiberoSim, rng: np.random.Generator, chunks: int = CHUNKS) -> None:
    """Run random chunks: wandering ones that also press down into the scene."""
    for _ in range(chunks):
        drift = rng.uniform(-0.8, 0.8, 7) - [0, 0, 0.3, 0, 0, 0, 0]
        actions = drift + rng.normal(0, 0.3, (CHUNK_LEN, 7))
        sim.run_chunk(np.clip(actions, -1, 1))
        assert np.isfinite(sim.qpos).all() and np.isfinite(sim.qvel).all()
        assert np.abs(sim.qvel).max() < 100


def check_intact(sim: LiberoSim, where: str) -> None:
    data = sim.data
    assert np.abs(data.xpos[1:]).max() < FAR, where
    # MuJoCo resets a simulation that becomes unstable, and counts it here.
    for kind in ("BADQPOS", "BADQVEL", "BADQACC"):
        number = data.warning[getattr(mujoco.mjtWarning, f"mjWARN_{kind}")].number
        assert number == 0, (where, kind, number)


def check_rest(sim: LiberoSim, before: dict[str, np.ndarray], where: str) -> None:
    """Check that objects rest close to where they were before they settled."""
    assert max(sim.object_speeds().values()) < 0.1, (where, sim.object_speeds())
    for body, position in positions(sim).items():
        # LIBERO's states were taken right after the placement: objects fall up to 16 cm onto
        # what they stand on, or rise out of the floor; what overlaps is pushed apart.
        moved = position - before[body]
        assert np.hypot(*moved[:2]) < 0.12 and abs(moved[2]) < 0.2, (where, body, moved)


def check_task(task: Task, assets: str | Path, states: int = 3, chunks: int = CHUNKS) -> None:
    model = load(task, assets)
    sim = LiberoSim(model)
    for state in states_of(task, states):
        where = f"{task.key}, official state {state}"
        sim.reset(model.official_layout(state), settle=False)
        before = positions(sim)
        sim.reset(model.official_layout(state))
        check_intact(sim, where)
        assert not sim.success(), where
        if assets == "lite":
            check_rest(sim, before, where)
        play(sim, np.random.default_rng(state), chunks)
        check_intact(sim, where)
        for body, position in positions(sim).items():
            assert position[2] > -0.02, f"{where}: {body} fell through the floor"
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
def test_a_task_of_the_real_pack(libero_assets_dir: Path) -> None:
    check_task(get_task("spatial", 4), libero_assets_dir, states=1, chunks=3)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_all_tasks_of_the_lite_pack(scene: str) -> None:
    for task in scene_of(SCENES[scene])[1]:
        check_task(task, "lite")


@pytest.mark.parametrize(
    ("suite", "task_id"),
    # Table, floor, a kitchen with a microwave, living room, study: scenes that other tests have.
    [("goal", 8), ("spatial", 4), ("object", 0), ("10", 9), ("90", 50), ("90", 73)],
)
def test_a_few_tasks_of_the_lite_pack(suite: str, task_id: int) -> None:
    check_task(get_task(suite, task_id), "lite", states=1, chunks=3)


def settled(task: Task, assets: str | Path) -> dict[tuple[int, str], np.ndarray]:
    model = load(task, assets)
    sim, found = LiberoSim(model), {}
    for state in states_of(task):
        sim.reset(model.official_layout(state))
        found |= {(state, body): position for body, position in positions(sim).items()}
    return found


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.parametrize("scene", SCENES)
def test_objects_rest_where_the_real_ones_do(libero_assets_dir: Path, scene: str) -> None:
    for task in scene_of(SCENES[scene])[1]:
        lite, real = settled(task, "lite"), settled(task, libero_assets_dir)
        assert lite.keys() == real.keys()
        for key, position in lite.items():
            where = f"{task.key}, {key}"
            np.testing.assert_allclose(position[2], real[key][2], atol=0.004, err_msg=where)
            np.testing.assert_allclose(position[:2], real[key][:2], atol=0.02, err_msg=where)


@pytest.mark.parametrize(("suite", "task_id"), [("spatial", 5), ("90", 34)])
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
