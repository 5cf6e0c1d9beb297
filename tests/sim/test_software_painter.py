"""The renderer that leaves out what cannot be seen draws the same pixels as MuJoCo's own."""

import numpy as np
import pytest
from render_pairs import PainterPair, fixed_camera, random_camera

from vla_gym.sim import LiberoSim
from vla_gym.suites import get_task, suite_tasks
from vla_gym.suites.libero import load_task_model

CAMERAS = ("agentview", "robot0_eye_in_hand")
CENTRE = np.array([0.0, 0.0, 1.0])
# One task of each kind of room.
ROOMS = [("goal", 0), ("spatial", 0), ("object", 1), ("10", 0), ("10", 2), ("10", 5), ("90", 80)]


def compare(suite, task_id, assets, *, size, fast, states):
    """Draw states along random episodes with both painters, from both and from random cameras."""
    model = load_task_model(get_task(suite, task_id), assets)
    sim, rng = LiberoSim(model), np.random.default_rng(task_id)
    pair = PainterPair(sim._shared, size, fast=fast)
    try:
        for k in range(states):
            if k % 4 == 0:
                layout = model.official_layout(k % 50) if k % 8 else model.sample_layout(rng)
                sim.reset(layout)
            sim.run_chunk(rng.uniform(-1, 1, (8, 7)))
            sim.prepare_render()
            cameras = [fixed_camera(sim._model, name) for name in CAMERAS]
            for camera in [*cameras, random_camera(rng, CENTRE), random_camera(rng, CENTRE)]:
                plain, lean = pair.draw(sim.data, camera)
                assert plain.std() > 1 or camera not in cameras
                np.testing.assert_array_equal(plain, lean)
    finally:
        pair.close()


@pytest.mark.parametrize("fast", [False, True])
def test_same_pixels_on_lite(fast):
    compare("goal", 0, "lite", size=96, fast=fast, states=6)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), ROOMS)
@pytest.mark.parametrize("fast", [False, True])
def test_same_pixels_on_lite_in_every_room(suite, task_id, fast):
    compare(suite, task_id, "lite", size=128, fast=fast, states=16)


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.usefixtures("libero_assets_dir")
@pytest.mark.parametrize("task", suite_tasks("goal"), ids=lambda task: task.name)
def test_same_pixels_on_the_real_meshes(task):
    compare("goal", task.task_id, "libero", size=256, fast=False, states=20)


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.usefixtures("libero_assets_dir")
@pytest.mark.parametrize(("suite", "task_id"), ROOMS[1:])
def test_same_pixels_on_the_real_meshes_in_every_room(suite, task_id):
    compare(suite, task_id, "libero", size=256, fast=False, states=16)
