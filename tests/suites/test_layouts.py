"""Start layouts: LIBERO's placement rules, distribution against upstream's, official states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributions import same_distribution

from vla_gym.errors import CompileError, UnknownTaskError
from vla_gym.outside import to_type
from vla_gym.sim import LiberoSim
from vla_gym.suites import get_task, suite_tasks
from vla_gym.suites.libero import TaskModel, load_task_model
from vla_gym.suites.libero.layouts import Placement, sample_poses

NO_JOINTS = np.empty(0)
MOVABLE = ("akita_black_bowl_1", "cream_cheese_1", "wine_bottle_1", "plate_1")


@pytest.fixture(scope="module")
def lite() -> TaskModel:
    return load_task_model(get_task("goal", 8))


def placement(name: str = "thing", **changes: Any) -> Placement:
    defaults: dict[str, Any] = {
        "name": name,
        "is_fixture": False,
        "x_ranges": [[-0.1, 0.1]],
        "y_ranges": [[0.0, 0.02]],
        "reference_pos": [0.5, 0.0, 0.9],
        "z_offset": 0.01,
        "rotation": [0.0, 0.0],
        "rotation_axis": "z",
        "scalar_last": False,
        "keep_inside": False,
        "avoid_overlap": True,
        "radius": 0.03,
        "bottom": -0.05,
        "top": 0.05,
    }
    return to_type({**defaults, **changes}, Placement, "a placement", CompileError)


def draw(spec: Placement, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    poses = [sample_poses([spec], rng, NO_JOINTS)[spec.name] for _ in range(count)]
    return np.array([p for p, _ in poses]), np.array([q for _, q in poses])


def test_regions_are_relative_to_the_table_and_height_follows_the_bottom() -> None:
    positions, _ = draw(placement())
    assert positions[:, 0].min() >= 0.4 and positions[:, 0].max() <= 0.6
    assert np.ptp(positions[:, 0]) > 0.19
    assert np.allclose(positions[:, 2], 0.9 + 0.01 + 0.05)


def test_objects_stay_inside_by_their_radius_even_where_that_turns_the_bounds_around() -> None:
    positions, _ = draw(placement(keep_inside=True))
    assert positions[:, 0].min() >= 0.43 and positions[:, 0].max() <= 0.57
    # The 2 cm wide y range shrinks by 3 cm on each side to [0.03, -0.01]: upstream draws between.
    assert positions[:, 1].min() >= -0.01 and positions[:, 1].max() <= 0.03
    assert np.ptp(positions[:, 1]) > 0.038


def test_one_of_several_regions_is_drawn() -> None:
    spec = placement(x_ranges=[[0.0, 0.01], [0.1, 0.11]], y_ranges=[[0.0, 0.01], [0.1, 0.11]])
    positions, _ = draw(spec)
    first = positions[:, 0] < 0.55
    assert 150 < first.sum() < 250
    assert (positions[first, 1] <= 0.01).all() and (positions[~first, 1] >= 0.1).all()


def test_rotations() -> None:
    half = np.sqrt(0.5)
    quarter = [np.pi / 2, np.pi / 2]
    _, quats = draw(placement(rotation=quarter, rotation_axis="x"), 1)
    assert np.allclose(quats[0], [half, half, 0, 0])
    # The table sampler's (x, y, z, w), read by MuJoCo as (w, x, y, z): a turn about z.
    _, quats = draw(placement(rotation=quarter, rotation_axis="x", scalar_last=True), 1)
    assert np.allclose(quats[0], [half, 0, 0, half])
    _, quats = draw(placement(rotation=None))
    assert np.ptp(2 * np.arctan2(quats[:, 3], quats[:, 0])) > 6.0
    several = {"x": quarter, "z": [0.0, 0.0]}
    _, quats = draw(placement(rotation=several, rotation_axis=None, scalar_last=True), 1)
    assert np.allclose(quats[0], [half, 0, 0, half])
    with pytest.raises(CompileError, match="axis"):
        draw(placement(rotation_axis="w"), 1)


def test_later_objects_avoid_earlier_ones() -> None:
    rng = np.random.default_rng(0)
    pair = [placement("a"), placement("b")]
    for _ in range(200):
        poses = sample_poses(pair, rng, NO_JOINTS)
        assert np.linalg.norm((poses["a"][0] - poses["b"][0])[:2]) > 0.06
    # An object whose bottom is above the other's top may be over it.
    above = [placement("a"), placement("b", z_offset=0.3)]
    distances = []
    for _ in range(200):
        poses = sample_poses(above, rng, NO_JOINTS)
        distances.append(np.linalg.norm((poses["a"][0] - poses["b"][0])[:2]))
    assert min(distances) < 0.06


def test_an_object_on_another_follows_it() -> None:
    point = {"x_ranges": [[0.0, 0.0]], "y_ranges": [[0.0, 0.0]], "avoid_overlap": False}
    rider = placement("rider", reference="below", lift=0.05, bottom=-0.02, **point)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(20):
        poses = sample_poses([placement("below"), rider], rng, NO_JOINTS)
        offset = poses["rider"][0] - poses["below"][0]
        assert np.allclose(offset, [0, 0, 0.05 + 0.01 + 0.02], rtol=0, atol=1e-15)
        seen.add(poses["rider"][0][0])
    assert len(seen) == 20


def test_an_object_in_a_drawer_follows_fixture_turn_and_joint() -> None:
    half = np.pi / 2
    cabinet = placement("cabinet", is_fixture=True, rotation=[half, half], avoid_overlap=False)
    inside = placement(
        "bowl",
        reference="cabinet",
        site_pos=[0.2, 0.0, 0.3],
        slides=[[1, [1.0, 0.0, 0.0]]],
        x_ranges=[[0.0, 0.0]],
        y_ranges=[[0.0, 0.0]],
        avoid_overlap=False,
    )
    for drawn_out in (0.0, 0.15):
        qpos = np.array([9.0, drawn_out])
        poses = sample_poses([cabinet, inside], np.random.default_rng(0), qpos)
        offset = poses["bowl"][0] - poses["cabinet"][0]
        # A quarter turn about z takes the site from x to y; 6 cm: z offset and the bowl's bottom.
        assert np.allclose(offset, [0.0, 0.2 + drawn_out, 0.36], rtol=0, atol=1e-12)


def test_an_objects_own_turn_comes_first() -> None:
    half = np.sqrt(0.5)
    quarter = [np.pi / 2, np.pi / 2]
    about_z = placement(rotation=quarter, scalar_last=True, init_quat=[half, 0.0, 0.0, half])
    _, quats = draw(about_z, 1)
    # (x, y, z, w) products: z after x.
    assert np.allclose(quats[0], [0.5, 0.5, 0.5, 0.5])


def test_impossible_layouts_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_gym.suites.libero.layouts.MAX_TRIES", 10)
    crowded = [placement(name, radius=0.2) for name in "ab"]
    with pytest.raises(CompileError, match="No valid layout of a, b"):
        sample_poses(crowded, np.random.default_rng(0), NO_JOINTS)


def test_same_generator_same_layout(lite: TaskModel) -> None:
    first = lite.sample_layout(np.random.default_rng(5))
    again = lite.sample_layout(np.random.default_rng(5))
    other = lite.sample_layout(np.random.default_rng(6))
    for field in ("qpos", "fixture_pos", "fixture_quat", "nullspace_qpos"):
        assert np.array_equal(getattr(first, field), getattr(again, field))
    assert not np.array_equal(first.qpos, other.qpos)


def test_sampling_leaves_global_randomness_alone(lite: TaskModel) -> None:
    before = np.random.get_state()[1].copy()
    lite.sample_layout(np.random.default_rng(0))
    lite.official_layout(0)
    assert np.array_equal(before, np.random.get_state()[1])


def test_sampled_layouts(lite: TaskModel) -> None:
    rng = np.random.default_rng(0)
    layouts = [lite.sample_layout(rng) for _ in range(200)]
    arm = np.array([layout.qpos[lite.robot.joint_qpos] for layout in layouts])
    assert np.allclose(arm.std(axis=0), 0.02, rtol=0.25)
    assert np.allclose(arm.mean(axis=0), lite.robot.init_qpos, atol=0.006)
    for layout in layouts:
        assert layout.qpos.shape == (lite.nq,) and layout.qvel.shape == (lite.nv,)
        assert layout.init_state_id == -1 and layout.time == 0 and not layout.qvel.any()
        assert np.array_equal(layout.nullspace_qpos, lite.robot.init_qpos)
        assert np.allclose(layout.qpos[lite.robot.gripper_qpos], [0.020833, -0.020833])
        assert layout.fixture_pos.shape == (3, 3) and layout.fixture_quat.shape == (3, 4)


def test_sampled_and_official_episodes_begin_with_the_arm_alike(lite: TaskModel) -> None:
    sim = LiberoSim(lite)
    starts: dict[str, np.ndarray] = {}
    for kind in ("official", "sampled"):
        poses = []
        for index in range(25):
            rng = np.random.default_rng(index)
            sim.reset(
                lite.official_layout(index) if kind == "official" else lite.sample_layout(rng)
            )
            position, matrix = sim.eef_pose()
            poses.append(np.append(position, np.abs(matrix[0])))
        starts[kind] = np.array(poses)
    official, sampled = starts["official"], starts["sampled"]
    np.testing.assert_allclose(sampled.mean(axis=0), official.mean(axis=0), atol=0.008)
    np.testing.assert_allclose(sampled.std(axis=0), official.std(axis=0), atol=0.006)


def test_official_layouts(lite: TaskModel) -> None:
    first = lite.official_layout(7)
    again = load_task_model(get_task("goal", 8)).official_layout(7)
    assert np.array_equal(first.fixture_pos, again.fixture_pos)
    state = lite.init_states[7]
    assert np.array_equal(np.concatenate([[first.time], first.qpos, first.qvel]), state)
    assert np.array_equal(first.nullspace_qpos, lite.robot.init_qpos)
    assert first.init_state_id == 7
    fixtures = [
        load_task_model(task).official_layout(i).fixture_pos.tobytes()
        for task in suite_tasks("goal")
        for i in range(5)
    ]
    assert len(set(fixtures)) == 50
    first.qpos[:] = 0  # a layout is the caller's own
    assert np.array_equal(lite.official_layout(7).qpos, state[1 : 1 + lite.nq])
    for bad in (-1, 50):
        with pytest.raises(UnknownTaskError, match="init_state_id"):
            lite.official_layout(bad)


def test_official_states_lie_where_our_sampler_draws(lite: TaskModel) -> None:
    rng = np.random.default_rng(0)
    ours = np.array([lite.sample_layout(rng).qpos for _ in range(500)])
    official = np.concatenate([load_task_model(t).init_states for t in suite_tasks("goal")])
    official = official[:, 1 : 1 + lite.nq]
    for name in MOVABLE:
        at = slice(lite.free_qpos[name], lite.free_qpos[name] + 7)
        same_distribution(ours[:, at], official[:, at], name)
