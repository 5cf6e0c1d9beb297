"""LiberoSim on the generated pack: determinism, snapshots, chunks, wrong input, compiled cache."""

from __future__ import annotations

import threading
from pathlib import Path

import mujoco
import numpy as np
import pytest
from run_python import run_python
from upstream import random_actions

from vla_gym.errors import ConfigError, InvalidActionError
from vla_gym.experts import make_expert
from vla_gym.sim import LiberoSim, Snapshot
from vla_gym.sim.libero_sim import NOOP
from vla_gym.suites import get_task
from vla_gym.suites.libero import TaskModel, load_task_model

TASK = 8  # put the bowl on the plate


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return load_task_model(get_task("goal", TASK), assets="lite")


@pytest.fixture
def sim(model: TaskModel) -> LiberoSim:
    sim = LiberoSim(model)
    sim.reset(model.official_layout(0))
    return sim


def same(a: Snapshot, b: Snapshot) -> bool:
    """Tell whether two snapshots are equal in every bit."""
    arrays = ("physics", "fixture_pos", "fixture_quat")
    equal = all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays)
    equal &= all(np.array_equal(vars(a.trace)[n], vars(b.trace)[n]) for n in vars(a.trace))
    names = ("goal_pos", "goal_mat", "gripper_command", "nullspace_qpos")
    equal &= all(np.array_equal(getattr(a.controller, n), getattr(b.controller, n)) for n in names)
    equal &= (a.controller.stale is None) == (b.controller.stale is None)
    return equal


def test_a_chunk_equals_single_steps(model: TaskModel) -> None:
    actions = random_actions(48, seed=1)
    chunked, single = LiberoSim(model), LiberoSim(model)
    for sim in (chunked, single):
        sim.reset(model.official_layout(1))
    for start in range(0, 48, 8):
        assert chunked.run_chunk(actions[start : start + 8]) == (8, False)
        for action in actions[start : start + 8]:
            single.step(action)
        assert same(chunked.get_state(), single.get_state())


def test_fast_and_exact_loops_agree(model: TaskModel) -> None:
    """Both round alike where NumPy's BLAS and numba's do; the promise is 1e-9 a control step."""
    fast, exact = LiberoSim(model), LiberoSim(model, physics="exact")
    exact.reset(model.official_layout(0))
    for action in random_actions(25, seed=3):
        fast.set_state(exact.get_state())
        assert fast.step(action) == exact.step(action)
        np.testing.assert_allclose(fast.qpos, exact.qpos, rtol=0, atol=1e-9)


def test_snapshot_continues_with_the_same_future(model: TaskModel, sim: LiberoSim) -> None:
    sim.run_chunk(random_actions(20, seed=4))
    snapshot, proprio = sim.get_state(), sim.proprio()
    corners, contacts = sim.collision_corners("plate_1_main"), sim.data.contact.geom.copy()
    future = random_actions(20, seed=5)
    sim.run_chunk(future)
    expected = sim.get_state()

    other = LiberoSim(model)
    other.reset(model.official_layout(7))
    other.set_state(snapshot)
    assert same(other.get_state(), snapshot)
    np.testing.assert_array_equal(other.proprio(), proprio)
    np.testing.assert_array_equal(other.collision_corners("plate_1_main"), corners)
    np.testing.assert_array_equal(other.data.contact.geom, contacts)
    other.run_chunk(future)
    assert same(other.get_state(), expected)
    assert not same(snapshot, expected), "the snapshot must not follow the simulation"


@pytest.mark.parametrize("physics", ["fast", "exact"])
def test_snapshot_before_the_first_control_step(model: TaskModel, physics: str) -> None:
    """The first control step has a memory of the reset posture; the snapshot must hold it."""
    first, second = (LiberoSim(model, physics=physics) for _ in range(2))  # type: ignore[arg-type]
    first.reset(model.official_layout(2), settle=False)
    snapshot = first.get_state()
    action = np.array([0.3, 0, 0, 0, 0.2, 0, 1])
    first.step(action)
    second.reset(model.official_layout(3))
    second.set_state(snapshot)
    second.step(action)
    assert same(first.get_state(), second.get_state())


def test_snapshot_of_another_scene_is_refused(sim: LiberoSim) -> None:
    state = sim.get_state()
    foreign = Snapshot(**{**vars(state), "scene_key": "elsewhere"})
    with pytest.raises(ConfigError, match="elsewhere"):
        sim.set_state(foreign)


@pytest.mark.parametrize(("steps", "gripper"), [(10, -1.0), (5, 0.0)])
def test_settled_official_state_is_the_same_from_the_cache(
    model: TaskModel, steps: int, gripper: float
) -> None:
    LiberoSim(model).reset(model.official_layout(5))  # others settle another way
    sim = LiberoSim(model, settle_steps=steps, settle_gripper=gripper)
    sim.reset(model.official_layout(5))
    first = sim.get_state()
    sim.run_chunk(random_actions(8))
    sim.reset(model.official_layout(5))
    assert same(first, sim.get_state())
    by_hand = LiberoSim(model)
    by_hand.reset(model.official_layout(5), settle=False)
    by_hand.run_chunk(np.repeat(np.append(NOOP[:6], gripper)[None], steps, axis=0))
    np.testing.assert_array_equal(by_hand.qpos, sim.qpos)


@pytest.mark.parametrize("steps", [10, 0])
def test_sampled_layouts_come_to_rest(model: TaskModel, steps: int) -> None:
    sim = LiberoSim(model, settle_steps=steps)
    for seed in range(5):
        sim.reset(model.sample_layout(np.random.default_rng(seed)))
        height = {name: sim.qpos[first + 2] for name, first in model.free_qpos.items()}
        before = sim.get_state()
        sim.run_chunk(np.repeat(NOOP[None], 10, axis=0))
        fallen = [height[name] - sim.qpos[first + 2] for name, first in model.free_qpos.items()]
        assert max(fallen) < 0.001, f"layout {seed} hangs in the air"
        sim.set_state(before)
        assert max(sim.object_speeds().values()) < 0.01, f"layout {seed} still moves"


@pytest.mark.parametrize(
    ("actions", "word"),
    [
        *((np.zeros(shape), "shape") for shape in ((7,), (0, 7), (8, 6), (2, 2, 7))),
        (np.vstack([np.zeros((7, 7)), np.full((1, 7), np.nan)]), "finite"),
    ],
)
def test_a_wrong_chunk_moves_nothing(sim: LiberoSim, actions: np.ndarray, word: str) -> None:
    """Single actions: tests/envs/test_env.py."""
    before = sim.get_state()
    with pytest.raises(InvalidActionError, match=word):
        sim.run_chunk(actions)
    assert same(before, sim.get_state())


def test_actions_are_clipped(model: TaskModel) -> None:
    ends = []
    for scale in (1.0, 50.0):
        sim = LiberoSim(model)
        sim.reset(model.official_layout(0))
        sim.run_chunk(np.tile(np.array([1, -1, 1, -1, 1, 1, 1]) * scale, (4, 1)))
        ends.append(sim.get_state())
    assert same(*ends)


def test_threads_do_not_disturb_each_other(model: TaskModel) -> None:
    actions = random_actions(24, seed=7)

    def play(index: int, results: dict[int, np.ndarray]) -> None:
        sim = LiberoSim(model)
        sim.reset(model.official_layout(index))
        for start in range(0, 24, 4):
            sim.run_chunk(actions[start : start + 4])
        results[index] = sim.qpos

    expected: dict[int, np.ndarray] = {}
    got: dict[int, np.ndarray] = {}
    for index in range(3):
        play(index, expected)
    threads = [threading.Thread(target=play, args=(i, got)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(3):
        np.testing.assert_array_equal(got[index], expected[index])


def test_set_task_changes_the_goal_only(model: TaskModel, sim: LiberoSim) -> None:
    before = sim.get_state()
    other = load_task_model(get_task("goal", 7), assets="lite")
    sim.set_task(other)
    assert same(before, sim.get_state())
    knob = other.goal[0].joint_qpos[0]
    sim._data.qpos[knob] = 1.0
    assert sim.success()
    sim.set_task(model)
    assert not sim.success()


def test_an_expert_succeeds_and_the_chunk_stops_there(model: TaskModel, sim: LiberoSim) -> None:
    expert, actions = make_expert(sim), []
    for _ in range(300):
        actions.append(expert.act())
        if sim.step(actions[-1]):
            break
    assert sim.success()
    end = sim.get_state()
    sim.reset(model.official_layout(0))
    padded = np.concatenate([np.array(actions), random_actions(10)])
    assert sim.run_chunk(padded) == (len(actions), True)
    assert same(sim.get_state(), end)


@pytest.mark.usefixtures("sim")  # makes sure that the cache is filled
def test_a_second_process_does_not_compile_again(tmp_path: Path) -> None:
    """The kernel comes from numba's disk cache, and MuJoCo's warnings leave no file behind."""
    script = """
import numpy as np
from vla_gym.sim import LiberoSim, osc_fast
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model
model = load_task_model(get_task("goal", 8), assets="lite")
sim = LiberoSim(model)
sim.reset(model.official_layout(0), settle=False)
sim.step(np.zeros(7))
stats = osc_fast._run.stats
assert stats.cache_hits and not stats.cache_misses, stats
sim._data.qvel[0] = 1e12
sim.step(np.zeros(7))
"""
    assert "unstable" in run_python(script, cwd=tmp_path).stderr
    assert not list(tmp_path.iterdir())


def test_observations_of_a_control_steps_end_show_where_the_joints_are(model: TaskModel) -> None:
    sim = LiberoSim(model, observation_timing="end")
    sim.reset(model.official_layout(0))
    sim.run_chunk(random_actions(8))
    now = mujoco.MjData(sim._model)
    now.qpos[:] = sim.qpos
    mujoco.mj_kinematics(sim._model, now)
    mujoco.mj_camlight(sim._model, now)
    assert np.array_equal(sim.proprio()[:3], now.site_xpos[sim._eef_site].astype(np.float32))
    shown = sim.prepare_render()
    for name in ("xpos", "geom_xpos", "cam_xpos", "cam_xmat"):
        np.testing.assert_array_equal(getattr(shown, name), getattr(now, name))
    assert not np.array_equal(sim.data.xpos, now.xpos)  # MuJoCo's own are of 2 ms before
