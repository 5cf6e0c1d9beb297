"""The software painter draws what MuJoCo draws, to the last bit, and much less of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mujoco
import numpy as np
import pytest
from render_pairs import PainterPair, fixed_camera, random_camera, scatter
from toy_scene import toy_model

from vla_gym.sim import LiberoSim
from vla_gym.sim.compiled import _folder_stamp
from vla_gym.sim.model_io import SharedModel, load_shared
from vla_gym.sim.rendering import painter as door
from vla_gym.sim.rendering.mujoco_painter import MujocoPainter
from vla_gym.sim.rendering.painter import make_painter
from vla_gym.sim.rendering.renderer import CAMERAS, _new_gl_context
from vla_gym.sim.rendering.software import SoftwarePainter, culling, scene_memory
from vla_gym.sim.rendering.software.draw_scene import draw_scene
from vla_gym.suites import get_task
from vla_gym.suites.libero import TaskModel, load_task_model

SIZE = 96
# Every task of a suite with detailed meshes, and one of each other kind of room.
GOALS = [("goal", task_id) for task_id in range(10)]
ROOMS = [("spatial", 0), ("object", 1), ("10", 0), ("10", 2), ("10", 5), ("90", 80)]
TABLE = np.array([-0.1, 0.0, 1.0])


@pytest.fixture(scope="module")
def toy() -> SharedModel:
    return SharedModel(toy_model())


@pytest.fixture
def context() -> Iterator[None]:
    """An OpenGL context that is current."""
    made = _new_gl_context(SIZE, SIZE)
    made.make_current()
    yield
    made.free()


def compare(pair: PainterPair, data: mujoco.MjData, camera: mujoco.MjvCamera) -> np.ndarray:
    """Draw with both painters, compare, return the image."""
    plain, lean = pair.draw(data, camera)
    np.testing.assert_array_equal(lean, plain)
    return plain


def looking(at: np.ndarray, distance: float, azimuth: float, elevation: float) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    camera.lookat[:], camera.distance = at, distance
    camera.azimuth, camera.elevation = azimuth, elevation
    return camera


@pytest.mark.parametrize("fast", [False, True])
def test_every_kind_of_geom_from_everywhere(toy: SharedModel, fast: bool) -> None:
    model, data = toy.model, mujoco.MjData(toy.model)
    mujoco.mj_forward(model, data)
    pair, rng = PainterPair(toy, SIZE, fast=fast), np.random.default_rng(0)
    images = [compare(pair, data, fixed_camera(model, name)) for name in ("front", "hand")]
    drawn = []
    for index in range(80):
        if index % 3 == 0:
            scatter(model, data, rng, np.array([0, 0, 0.5]))
        images.append(compare(pair, data, random_camera(rng, np.array([0, 0, 0.45]))))
        drawn.append(pair.triangles_drawn())
    pair.close()
    assert np.mean([image.std() > 10 for image in images]) > 0.8, "most images show something"
    everything = int(model.mesh_facenum.sum()) + int(model.mesh_facenum[0])
    assert 50 < np.mean(drawn) < 0.25 * everything


def test_the_mirror_shows_the_scene(toy: SharedModel) -> None:
    data = mujoco.MjData(toy.model)
    mujoco.mj_forward(toy.model, data)
    pair = PainterPair(toy, SIZE)
    camera = looking(np.array([0.1, -0.2, 0.46]), 0.5, 180, -40)
    with_mirror = compare(pair, data, camera)
    for painter in pair.painters:
        painter._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
    pair.painters[1]._reflections = False
    assert np.any(compare(pair, data, camera) != with_mirror)
    pair.close()


@pytest.mark.parametrize("fast", [False, True])
def test_lite_pack(fast: bool) -> None:
    model = load_task_model(get_task("goal", 7), assets="lite")
    check_pack(model, PainterPair(load_shared(model), SIZE, fast=fast), images=24)


def check_pack(model: TaskModel, pair: PainterPair, images: int) -> None:
    """Compare official states, states after random actions, scattered objects; any camera."""
    sim, rng = LiberoSim(model), np.random.default_rng(3)
    cameras = [fixed_camera(sim._model, name) for name in CAMERAS]
    for index in range(images):
        if index % 4 == 0:
            sim.reset(model.official_layout(index % 50), settle=index % 8 == 0)
            if index % 8 == 4:
                scatter(sim._model, sim._data, rng, np.asarray(sim._data.cam("agentview").xpos))
        elif index % 8 < 4:
            sim.run_chunk(rng.uniform(-1, 1, (8, 7)))
        sim.prepare_render()
        image = compare(pair, sim.data, cameras[index % 2])
        assert index % 8 > 3 or image.std() > 10
        compare(pair, sim.data, random_camera(rng, TABLE))
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), ROOMS)
@pytest.mark.parametrize("fast", [False, True])
def test_lite_pack_in_every_room(suite: str, task_id: int, fast: bool) -> None:
    model = load_task_model(get_task(suite, task_id), assets="lite")
    check_pack(model, PainterPair(load_shared(model), 128, fast=fast), images=32)


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("suite", "task_id"), [*GOALS, *ROOMS])
def test_libero_pack(suite: str, task_id: int, libero_assets_dir: Path) -> None:
    model = load_task_model(get_task(suite, task_id), assets=libero_assets_dir)
    sim, rng = LiberoSim(model), np.random.default_rng(task_id)
    pair = PainterPair(load_shared(model), 256)
    cameras = [fixed_camera(sim._model, name) for name in CAMERAS]
    for index in range(20):
        sim.reset(model.official_layout((20 * task_id + index) % 50))
        drift = rng.uniform(-1, 1, 7)
        noise = rng.uniform(-0.5, 0.5, (8 * (index % 10) + 1, 7))
        sim.run_chunk(np.clip(drift + noise, -1, 1))
        sim.prepare_render()
        for camera in cameras:
            compare(pair, sim.data, camera)
            # In goal's scene, whose meshes the bound was measured with.
            if suite == "goal":
                assert pair.triangles_drawn() < 0.3 * sim._model.mesh_facenum.sum()
        compare(pair, sim.data, random_camera(rng, TABLE))
    pair.close()


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("size", "fast"), [(64, False), (160, False), (128, True)])
def test_libero_pack_from_everywhere(size: int, fast: bool) -> None:
    model = load_task_model(get_task("goal", 7), assets="libero")
    check_pack(model, PainterPair(load_shared(model), size, fast=fast), images=100)


def test_who_draws(monkeypatch: pytest.MonkeyPatch, toy: SharedModel, context: None) -> None:
    def kind(shared: SharedModel, fast: bool = False) -> type:
        painter = make_painter(shared, SIZE, SIZE, fast=fast)
        painter.free()
        return type(painter)

    assert kind(toy) is SoftwarePainter
    shadows = SharedModel(toy_model(shadow=True))
    assert kind(shadows) is MujocoPainter
    assert kind(shadows, fast=True) is SoftwarePainter, "the fast profile has no shadows"
    assert kind(SharedModel(toy_model(infinite_floor=True))) is MujocoPainter
    with monkeypatch.context() as patch:
        patch.setattr(scene_memory, "COLUMNS", 60)
        assert kind(toy) is MujocoPainter, "another layout of MuJoCo's geoms"
    with monkeypatch.context() as patch:
        patch.setattr(scene_memory, "_INTEGERS", ("dataid",))
        assert kind(toy) is MujocoPainter
    monkeypatch.setattr("OpenGL.GL.glGetString", lambda _: b"NVIDIA H100/PCIe/SSE2")
    assert kind(toy) is MujocoPainter


@pytest.mark.parametrize("kind", [MujocoPainter, SoftwarePainter])
def test_a_painter_leaves_the_model_as_it_was(
    toy: SharedModel, context: None, kind: type[MujocoPainter]
) -> None:
    def copy() -> list[np.ndarray]:
        quality, size = toy.model.vis.quality, toy.model.vis.global_
        numbers = [quality.offsamples, quality.shadowsize, size.offwidth, size.offheight]
        arrays = (toy.model.mesh_facenum, toy.model.mesh_graphadr, toy.model.geom_dataid)
        return [np.array(numbers), *(array.copy() for array in arrays)]

    before = copy()
    kind(toy, SIZE, SIZE, fast=True).free()
    for old, new in zip(before, copy(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("gpus", "told", "expected"),
    [([], "", True), (["renderD128"], "", False), (["renderD128"], "true", True)],
)
def test_without_a_gpu_images_are_drawn_in_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], told: str, expected: bool
) -> None:
    for name in gpus:
        (tmp_path / name).touch()
    monkeypatch.setattr(door, "_GPUS", (str(tmp_path / "nothing*"), str(tmp_path / "render*")))
    monkeypatch.setenv("LIBGL_ALWAYS_SOFTWARE", told)
    assert door.surely_in_software() == expected


def test_compiled_code_knows_of_changes_in_other_files() -> None:
    for function in (draw_scene, culling.box_side):
        assert function._cache._cache_file._source_stamp[1] == _folder_stamp()
