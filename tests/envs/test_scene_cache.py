"""Scenes kept ready: shared renderers, bounds, threads, garbage collection."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref

import gymnasium as gym
import numpy as np
import pytest

from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.scene_cache import SceneCache, _pool, load_task
from vla_gym.errors import AssetError
from vla_gym.sim.rendering import renderer as renderer_module
from vla_gym.suites import get_task
from vla_gym.suites.libero import TaskModel

SIZE = 32
CAMERAS = ("agentview", "robot0_eye_in_hand")


def num_renderers() -> int:
    """Count the shared renderers that this thread keeps."""
    return len(_pool().renderers)


def open_contexts() -> int:
    """Count the renderers of this process that hold an OpenGL context."""
    gc.collect()
    return sum(renderer._painter is not None for renderer in renderer_module._open)


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = open_contexts()
    assert num_renderers() == 0
    yield
    assert num_renderers() == 0
    assert open_contexts() == before


def make(**kwargs) -> LiberoEnv:
    return LiberoEnv("goal", **{"task_ids": [7, 8], "image_size": SIZE, **kwargs})


def same_scene_under_other_keys(count: int) -> list[TaskModel]:
    """Return the one scene there is, as if it were several: the cache tells them by their keys."""
    model = load_task(get_task("goal", 8), "lite")
    return [dataclasses.replace(model, scene_key=f"{model.scene_key}-{i}") for i in range(count)]


def make_cache(max_scenes: int = 8) -> SceneCache:
    return SceneCache(image_size=SIZE, visual_profile=None, max_scenes=max_scenes)


def draw(cache: SceneCache, model: TaskModel, state: int = 0) -> np.ndarray:
    sim = cache.simulation(model)
    sim.reset(model.official_layout(state))
    out = np.zeros((2, SIZE, SIZE, 3), np.uint8)
    cache.render(sim, out, CAMERAS)
    assert out.std() > 10
    return out


def test_vectorised_environments_of_a_thread_hold_one_renderer() -> None:
    before = open_contexts()
    envs = gym.make_vec(
        "Libero-goal-v0", num_envs=4, vectorization_mode="sync", image_size=SIZE, chunk_len=2
    )
    single = make(task_ids=None, chunk_len=2)
    obs, _ = envs.reset(seed=3)
    expected = [single.reset(seed=3 + index)[0]["agentview"] for index in range(4)]
    np.testing.assert_array_equal(obs["agentview"], expected)
    assert (num_renderers(), open_contexts() - before) == (1, 1)
    envs.step(envs.action_space.sample())
    envs.close()
    assert (num_renderers(), open_contexts() - before) == (1, 1)
    single.close()


def test_the_last_environment_frees_the_renderer_by_close_or_by_garbage_collection() -> None:
    before = open_contexts()
    first, second, third = make(), make(), make()
    for env in (first, second, third):
        env.reset(seed=0)
    assert first.renderer is second.renderer is third.renderer
    first.close()
    first.close()
    assert first.renderer is None and num_renderers() == 1
    second.cycle = second  # reference counts alone do not free it
    gone = weakref.ref(second)
    del second, env
    assert gone() is not None
    gc.collect()
    assert gone() is None and num_renderers() == 1
    expected = third.reset(seed=1)[0]
    del third
    assert (num_renderers(), open_contexts()) == (0, before)
    with pytest.raises(gym.error.ResetNeeded):
        first.step(np.zeros(7))
    for env in (make(), first):  # a new one, and a closed one that is used again
        np.testing.assert_array_equal(env.reset(seed=1)[0]["wrist"], expected["wrist"])
        env.close()


def test_sizes_and_profiles_have_renderers_of_their_own() -> None:
    envs = [make(), make(image_size=40), make(visual_profile="libero"), make(visual_profile="fast")]
    images = [env.reset(seed=0)[0]["agentview"] for env in envs]
    assert num_renderers() == 3
    assert [image.shape[0] for image in images] == [SIZE, 40, SIZE, SIZE]
    assert envs[2].renderer.profile == "libero"
    np.testing.assert_array_equal(images[0], images[3])
    assert not np.array_equal(images[0], images[2])
    for env in envs:
        env.close()


def test_no_renderer_without_images() -> None:
    env, other = make(cameras=()), make(cameras=(), render_mode="rgb_array")
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="render_mode='rgb_array'"):
        assert env.render() is None
    assert env.renderer is None and num_renderers() == 0
    other.reset(seed=0)
    assert other.render().shape == (SIZE, SIZE, 3) and num_renderers() == 1
    other.close()


def test_the_least_recently_used_scene_goes_first() -> None:
    before = open_contexts()
    cache, models = make_cache(max_scenes=2), same_scene_under_other_keys(3)
    expected = draw(cache, models[0])
    draw(cache, models[1])
    kept, dropped = cache.simulation(models[0]), weakref.ref(cache.simulation(models[1]))
    draw(cache, models[0])
    draw(cache, models[2])  # the second one goes
    gc.collect()
    assert (num_renderers(), open_contexts() - before) == (2, 2)
    assert cache.simulation(models[0]) is kept and dropped() is None
    renderer = cache.renderer(models[0])
    np.testing.assert_array_equal(draw(cache, models[1]), expected)  # made again; the third goes
    assert cache.renderer(models[0]) is renderer
    assert (num_renderers(), open_contexts() - before) == (2, 2)
    cache.close()


def test_the_most_generous_bound_of_a_thread_counts() -> None:
    models = same_scene_under_other_keys(3)
    narrow, generous = make_cache(max_scenes=1), make_cache(max_scenes=3)
    for cache, model in zip((narrow, generous, narrow), models, strict=True):
        draw(cache, model)
    assert num_renderers() == 3
    generous.close()
    draw(narrow, models[1])
    assert num_renderers() == 1
    narrow.close()


def test_two_files_of_one_scene_do_not_share_a_renderer(tmp_path) -> None:
    """Fixtures are written into the model that is drawn: it must be the simulation's own."""
    model = load_task(get_task("goal", 8), "lite")
    copy = tmp_path / "scene.mjb"
    copy.write_bytes(model.mjb_path.read_bytes())
    cache, models = make_cache(), [model, dataclasses.replace(model, mjb_path=copy)]
    images = [[draw(cache, each, state) for each in models] for state in (0, 5)]
    for first, second in images:
        np.testing.assert_array_equal(first, second)
    assert num_renderers() == 2
    cache.close()


def test_each_thread_has_renderers_of_its_own() -> None:
    before = open_contexts()
    env = make()
    expected = env.reset(seed=0)[0]["agentview"]
    seen: dict[str, object] = {}

    def work() -> None:
        own = make()
        seen["own"] = own.reset(seed=0)[0]["agentview"]
        seen["count"] = num_renderers()
        own.close()
        seen["left"] = num_renderers()
        seen["moved"] = env.reset(seed=0)[0]["agentview"]  # one that comes from another thread
        seen["contexts"] = open_contexts()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert (seen["count"], seen["left"]) == (1, 0)
    np.testing.assert_array_equal(seen["own"], expected)
    np.testing.assert_array_equal(seen["moved"], expected)
    assert seen["contexts"] - before == 2
    assert open_contexts() - before == 1, "a thread takes its contexts along"
    np.testing.assert_array_equal(env.reset(seed=0)[0]["agentview"], expected)
    env.close()


def test_what_another_thread_lets_go_waits_for_the_thread_of_the_context() -> None:
    before = open_contexts()
    env, other = make(), make(image_size=40)
    env.reset(seed=0)
    expected = other.reset(seed=0)[0]["agentview"]
    thread = threading.Thread(target=env.close)
    thread.start()
    thread.join(60)
    assert open_contexts() - before == 2
    np.testing.assert_array_equal(other.reset(seed=0)[0]["agentview"], expected)
    assert open_contexts() - before == 1
    other.close()


def test_garbage_that_is_collected_inside_a_render_waits_for_its_end(monkeypatch) -> None:
    dead, env = make(image_size=40), make()
    dead.reset(seed=0)
    expected = env.reset(seed=0)[0]["agentview"]
    dead.cycle = dead
    kept = weakref.ref(dead)
    real, counts = type(env.renderer).render, []

    def render(self, *args, **kwargs) -> None:
        gc.collect()
        counts.append(num_renderers())
        real(self, *args, **kwargs)

    del dead
    monkeypatch.setattr(type(env.renderer), "render", render)
    np.testing.assert_array_equal(env.reset(seed=0)[0]["agentview"], expected)
    assert kept() is None and counts == [2] and num_renderers() == 1
    env.close()


def test_a_compiled_task_is_loaded_once_a_process(tmp_path) -> None:
    task = get_task("goal", 3)
    model = load_task(task, "lite")
    assert load_task(task, "lite") is model
    by_path = load_task(task, model.assets.root)
    assert by_path is not model and by_path.scene_key == model.scene_key
    for _ in range(2):
        with pytest.raises(AssetError):
            load_task(task, tmp_path)
