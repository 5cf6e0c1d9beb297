"""Depth, segmentation and camera matrices, beside MuJoCo's own renderer and known bodies."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import vla_gym  # noqa: F401
from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.scene_cache import _pool
from vla_gym.errors import ConfigError
from vla_gym.sim.model_io import load_shared

SIZE = 96
BOWL, STOVE = 8, 7
GEOMETRY = {"depth": True, "segmentation": True, "image_size": SIZE}
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (5, 7)).astype(np.float32)


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv("goal", task_ids=BOWL, **GEOMETRY)
    yield env
    env.close()


def mujoco_geometry(env, camera):
    """Return depth (H, W), and segmentation (H, W, 2) as id and kind, of mujoco.Renderer."""
    shared, option = load_shared(env.task_model), mujoco.MjvOption()
    option.geomgroup[:2], option.sitegroup[:] = (0, 1), 0
    found = []
    with shared.lock, mujoco.Renderer(shared.model, SIZE, SIZE) as renderer:
        data = env.sim.prepare_render()
        renderer.enable_depth_rendering()
        renderer.update_scene(data, CAMERAS[camera], option)
        found.append(renderer.render())
        renderer.enable_segmentation_rendering()
        renderer.update_scene(data, CAMERAS[camera], option)
        found.append(renderer.render())
    return found


@pytest.mark.parametrize(("task", "variation"), [(BOWL, None), (STOVE, "strong")])
def test_pixels_are_those_of_mujocos_renderer(task, variation):
    env = LiberoEnv("goal", task_ids=task, variation=variation, **GEOMETRY)
    obs, _ = env.reset(seed=0)
    for action in (None, *ACTIONS[:2]):
        obs = obs if action is None else env.step(action)[0]
        assert env.observation_space.contains(obs)
        for camera in CAMERAS:
            depth, kinds = mujoco_geometry(env, camera)
            np.testing.assert_array_equal(obs[f"{camera}_depth"], depth)
            np.testing.assert_array_equal(obs[f"{camera}_segmentation"], kinds[..., 0])
            assert set(np.unique(kinds[..., 1])) <= {-1, mujoco.mjtObj.mjOBJ_GEOM}
            assert len(np.unique(kinds[..., 0])) > 5
    env.close()


def test_colours_are_what_they_are_without(env):
    plain = LiberoEnv("goal", task_ids=BOWL, image_size=SIZE)
    expected, obs = plain.reset(seed=4)[0], env.reset(seed=4)[0]
    for action in ACTIONS[:3]:
        assert all(np.array_equal(obs[key], expected[key]) for key in expected)
        expected, obs = plain.step(action)[0], env.step(action)[0]
    plain.close()


@pytest.mark.parametrize("camera", CAMERAS)
def test_pixels_of_a_body_lie_where_the_body_is(env, camera):
    obs, _ = env.reset(seed=0)
    # Above the bowl, so that both cameras see it.
    for _ in range(6):
        obs, *_ = env.step(np.array([0, 0, -0.3, 0, 0, 0, -1], np.float32))
    bodies = np.array(env.geom_bodies())
    geoms, depth = obs[f"{camera}_segmentation"], obs[f"{camera}_depth"]
    names = {str(bodies[geom]) for geom in np.unique(geoms[geoms >= 0])}
    intrinsics, extrinsics = env.camera_intrinsics(camera), env.camera_extrinsics(camera)
    checked = 0
    for name in names:
        corners = env.sim.collision_corners(name)
        if not name.endswith("_main") or len(corners) == 0:
            continue
        rows, columns = np.nonzero((geoms >= 0) & (bodies[geoms] == name))
        rays = np.linalg.inv(intrinsics) @ [columns + 0.5, rows + 0.5, np.ones(len(rows))]
        points = np.linalg.inv(extrinsics) @ [*(rays * depth[rows, columns]), np.ones(len(rows))]
        low, high = corners.min(0) - 0.01, corners.max(0) + 0.01
        inside = ((points[:3].T > low) & (points[:3].T < high)).all(1)
        assert inside.mean() > 0.95, (name, inside.mean())
        checked += len(rows)
    assert checked > 100


def test_depth_stays_beside_what_a_vla_makes():
    env = gym.make("LiberoVLA-goal-v0", vla="mini-few", rl_token=None, task_ids=BOWL, depth=True)
    obs, _ = env.reset(seed=0)
    size = env.unwrapped.image_size
    assert obs["wrist_depth"].shape == (size, size) and "wrist" not in obs
    env.close()


def test_renderers_are_freed():
    before = len(_pool().renderers)
    env = LiberoEnv("goal", task_ids=BOWL, **GEOMETRY | {"image_size": 33}, scene_cache_size=1)
    env.reset(seed=0)
    env.step(ACTIONS[0])
    assert len(_pool().renderers) == before + 2
    env.close()
    assert len(_pool().renderers) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": True, "cameras": ()}, "depth=True needs a camera, got cameras=()"),
        ({"segmentation": True, "cameras": ()}, "segmentation=True needs a camera"),
        ({"depth": 1}, "depth must be True or False, got 1"),
        ({"segmentation": "instance"}, "segmentation must be True or False, got 'instance'"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ConfigError) as told:
        LiberoEnv("goal", **wrong)
    assert message in str(told.value)


def test_wrong_cameras(env):
    with pytest.raises(ConfigError, match="camera must be one of 'agentview', 'wrist'; got 'top'"):
        env.camera_intrinsics("top")
    with pytest.raises(gym.error.ResetNeeded):
        LiberoEnv("goal").camera_extrinsics("wrist")
