"""SceneRenderer on the generated pack: orientation, profiles, shared models, missing EGL."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from mujoco import FatalError
from run_python import ROOT, run_python

from vla_gym.errors import ConfigError, RenderError
from vla_gym.sim import LiberoSim, SceneRenderer
from vla_gym.suites import get_task
from vla_gym.suites.libero import TaskModel, load_task_model

SIZE = 96


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return load_task_model(get_task("goal", 7), assets="lite")


@pytest.fixture
def sim(model: TaskModel) -> LiberoSim:
    sim = LiberoSim(model)
    sim.reset(model.official_layout(0))
    return sim


def render(renderer: SceneRenderer, sim: LiberoSim) -> np.ndarray:
    out = np.zeros((2, renderer.height, renderer.width, 3), np.uint8)
    renderer.render(sim, out)
    return out


def expected_row(sim: LiberoSim, point: np.ndarray, height: int) -> float:
    """Return the image row, counted from the top, in which agentview sees a point."""
    camera = sim._data.camera("agentview")
    local = camera.xmat.reshape(3, 3).T @ (point - camera.xpos)
    focal = height / 2 / np.tan(np.radians(sim._model.camera("agentview").fovy[0]) / 2)
    return float(height / 2 - focal * local[1] / -local[2])


@pytest.mark.parametrize("profile", ["libero", "fast"])
def test_images_are_upright(model: TaskModel, sim: LiberoSim, profile: str) -> None:
    renderer = SceneRenderer(model, SIZE, SIZE, profile=profile)
    address = model.free_qpos["akita_black_bowl_1"]
    images, rows = [], []
    for height in (1.25, 1.35):
        layout = model.official_layout(0)
        layout.qpos[address : address + 3] = [0.1, 0.0, height]
        sim.reset(layout, settle=False)
        images.append(render(renderer, sim)[0].astype(int))
        rows.append(expected_row(sim, sim.body_pos("akita_black_bowl_1_main"), SIZE))
    changed = np.flatnonzero((np.abs(images[1] - images[0]).sum(axis=-1) > 60).any(axis=1))
    for row in rows:  # where the bowl was and where it is, above the middle
        assert np.abs(changed - row).min() <= 1
    assert changed.max() < SIZE / 2
    renderer.close()


def test_rendering_is_repeatable_and_leaves_the_simulation_alone(
    model: TaskModel, sim: LiberoSim
) -> None:
    renderer = SceneRenderer(model, SIZE, SIZE, profile="fast")
    state = sim.get_state()
    first = render(renderer, sim)
    assert first.std() > 10
    np.testing.assert_array_equal(first, render(renderer, sim))
    renderer.close()
    np.testing.assert_array_equal(first, render(renderer, sim))  # makes a new context
    np.testing.assert_array_equal(state.physics, sim.get_state().physics)
    assert renderer.renderer_info()
    renderer.close()


def test_each_simulation_shows_its_own_fixtures_and_stove(model: TaskModel) -> None:
    renderer = SceneRenderer(model, SIZE, SIZE, profile="fast")
    sims = [LiberoSim(model, observation_timing="end") for _ in range(2)]
    for index, sim in enumerate(sims):
        sim.reset(model.official_layout(index))
    lamp = model.indicators[0]
    sims[0]._data.qpos[lamp.joint_qpos] = lamp.threshold - 1e-6
    cold = [render(renderer, sim) for sim in sims]
    assert not np.array_equal(*cold)
    sims[0]._data.qpos[lamp.joint_qpos] = lamp.threshold + 1e-6
    hot = [render(renderer, sim) for sim in sims]
    np.testing.assert_array_equal(hot[1], cold[1])
    assert not np.array_equal(hot[0], cold[0]), "a lit stove shows its burner"
    renderer.close()


def test_wrong_arguments(model: TaskModel, sim: LiberoSim) -> None:
    renderer = SceneRenderer(model, SIZE, SIZE)
    with pytest.raises(ConfigError, match="out must be"):
        renderer.render(sim, np.zeros((2, SIZE, SIZE + 1, 3), np.uint8))
    with pytest.raises(ConfigError, match="agentview"):
        renderer.render(sim, np.zeros((1, SIZE, SIZE, 3), np.uint8), cameras=("nowhere",))
    with pytest.raises(ConfigError, match="profile"):
        SceneRenderer(model, SIZE, SIZE, profile="pretty")
    with pytest.raises(ConfigError, match="4096"):
        SceneRenderer(model, 0, SIZE)


def test_images_go_where_the_caller_wants(model: TaskModel, sim: LiberoSim) -> None:
    renderer = SceneRenderer(model, SIZE, SIZE, profile="fast")
    expected = render(renderer, sim)
    rows = np.zeros((3, 2, SIZE, SIZE, 3), np.uint8)
    wide = np.zeros((SIZE, 2 * SIZE, 3), np.uint8)
    renderer.render(sim, (rows[1, 0], wide[:, SIZE:]))
    np.testing.assert_array_equal(rows[1, 0], expected[0])
    np.testing.assert_array_equal(wide[:, SIZE:], expected[1])
    assert not rows[0].any() and not rows[2].any() and not wide[:, :SIZE].any()
    with pytest.raises(ConfigError, match="2 images.*got 1"):
        renderer.render(sim, [rows[1, 0]])
    with pytest.raises(ConfigError, match="float64"):
        renderer.render(sim, [rows[1, 0], np.zeros((SIZE, SIZE, 3))])
    with pytest.raises(ConfigError, match="list"):
        renderer.render(sim, [rows[1, 0], []])
    renderer.close()


def test_another_thread_is_told_to_use_its_own(model: TaskModel, sim: LiberoSim) -> None:
    renderer = SceneRenderer(model, SIZE, SIZE, profile="fast")
    expected = render(renderer, sim)
    errors: list[Exception] = []
    images: list[np.ndarray] = []

    def work() -> None:
        try:
            render(renderer, sim)
        except Exception as error:
            errors.append(error)
        own = SceneRenderer(model, SIZE, SIZE, profile="fast")
        images.append(render(own, sim))
        own.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(errors[0], RenderError)
    assert "a thread" in str(errors[0])
    np.testing.assert_array_equal(images[0], expected)
    renderer.close()


def test_no_device_is_one_clear_error(tmp_path: Path) -> None:
    script = """
import numpy as np
from vla_gym.errors import RenderError
from vla_gym.sim import LiberoSim, SceneRenderer
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model
model = load_task_model(get_task("goal", 7), assets="lite")
sim = LiberoSim(model)
try:
    SceneRenderer(model, 32, 32).render(sim, np.zeros((2, 32, 32, 3), np.uint8))
except RenderError as error:
    raise SystemExit(f"RenderError: {error}")
"""
    result = run_python(script, fails=True, cwd=tmp_path, MUJOCO_EGL_DEVICE_ID="99")
    assert result.stderr.startswith("RenderError"), result.stderr
    assert "MUJOCO_EGL_DEVICE_ID" in result.stderr
    assert "libgl1-mesa-dri" in result.stderr


@pytest.mark.parametrize(
    ("error", "raised", "advice"),
    [
        (FatalError("gladLoadGL error"), RenderError, True),
        (OSError("libGL.so.1"), RenderError, True),
        (RenderError("The OpenGL library lacks glFlush."), RenderError, False),
        (ValueError("a bug"), ValueError, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_failures_of_opengl_get_advice_about_it(
    model, sim, error, raised, advice, monkeypatch
) -> None:
    renderer = SceneRenderer(model, SIZE, SIZE)
    monkeypatch.setattr(renderer, "_new_painter", Mock(side_effect=error))
    with pytest.raises(raised, match=str(error)) as found:
        render(renderer, sim)
    assert ("libegl1" in str(found.value)) == advice


def test_mesa_draws_without_threads_and_after_triton(tmp_path: Path) -> None:
    """Its threads damage the heap after some million images (Mesa's lp_fence.c).

    A torch for CUDA, whose LLVM is another, would end the process if it was imported later.
    """
    (tmp_path / "triton.py").write_text(
        "from pathlib import Path\n"
        "print('after Mesa:', 'libLLVM' in Path('/proc/self/maps').read_text())\n"
    )
    code = """
import os
from vla_gym.envs.libero import LiberoEnv
env = LiberoEnv("goal", image_size=32)
env.reset(seed=0)
print(env._scenes.renderer(env.unwrapped._sim.task_model).renderer_info())
tasks = os.listdir("/proc/self/task")
print(any("llvmpipe" in open(f"/proc/self/task/{task}/comm").read() for task in tasks))
print(os.environ.get("LP_NUM_THREADS"))
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = run_python(code, LP_NUM_THREADS=None, PYTHONPATH=path)
    assert "after Mesa: False" in result.stdout
    name, *found = result.stdout.split("\n")[-4:-1]
    if "llvmpipe" not in name:
        pytest.skip(f"drawn by {name}, not by Mesa's llvmpipe")
    assert found == ["False", "None"]
