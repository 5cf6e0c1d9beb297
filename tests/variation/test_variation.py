"""Domain variation: seeded, reported, carried by states, and nothing but what it says it varies."""

import contextlib
import dataclasses
import functools
import os
import pickle
import signal
from dataclasses import replace
from functools import partial

import h5py
import imageio.v3 as imageio
import mujoco
import numpy as np
import pytest
from render_pairs import PainterPair, fixed_camera
from trees import assert_same
from vector_reference import (
    SAME_STEP,
    Follower,
    Reference,
    copied,
    follow,
    random_action,
)

from vla_gym import DomainVariation
from vla_gym.demos.config import DemosConfig
from vla_gym.demos.record import record_demos
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.experts import make_expert
from vla_gym.sim import LiberoSim
from vla_gym.sim.libero_sim import NOOP
from vla_gym.suites import SUITES, get_task, suite_tasks
from vla_gym.suites.libero import load_task_model
from vla_gym.variation import VARIATION_WIDTH
from vla_gym.variation.clutter import geom_points
from vla_gym.variation.drawn import CLUTTER_KINDS, PARTS, part, plain_vector
from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.evaluation.play import PlayConfig, play_video

pytestmark = pytest.mark.usefixtures("warm_server")

SMALL = {"image_size": 64, "chunk_len": 4, "max_control_steps": 6}
STRONG = DomainVariation.preset("strong")
#: Everything but the solid part.
IMAGES_ONLY = DomainVariation(**{**vars(STRONG), "distractors": 0})
KINDS = {
    "light": DomainVariation(light_intensity=0.5, light_color=0.5, light_direction=180),
    "camera": DomainVariation(camera_position=0.1, camera_rotation=5, camera_fov=4),
    "wrist": DomainVariation(wrist_position=0.02, wrist_rotation=5),
    "table": DomainVariation(table_color=0.7),
    "floor": DomainVariation(floor_color=0.7),
    "wall": DomainVariation(wall_color=0.7),
    "objects": DomainVariation(object_color=0.4),
    "distractors": DomainVariation(distractors=3),
}


@pytest.fixture
def make():
    """Make environments that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(
            contextlib.closing(LiberoEnv(*args, **kwargs))
        )


def play(env, seed=5, episodes=2, steps=2):
    """Observations, infos and physical states of some episodes."""
    found = []
    for episode in range(episodes):
        obs, info = env.reset(seed=seed if episode == 0 else None)
        found.append((copied(obs), copied(info), env.unwrapped.sim.qpos))
        rng = np.random.default_rng(episode)
        for _ in range(steps):
            action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            obs, *_, info = env.step(action)
            found.append((copied(obs), copied(info), env.unwrapped.sim.qpos))
            if env.unwrapped._needs_reset:
                break
    return found


@functools.cache
def played_plainly(suite, task):
    """The same of an environment without variation."""
    with contextlib.closing(LiberoEnv(suite, task_ids=task, **SMALL)) as env:
        return play(env)


def looks(env, episodes, seed=5):
    """The variation of each episode."""
    return [env.reset(seed=seed if k == 0 else None)[1]["variation"] for k in range(episodes)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_changes_images_and_nothing_else(make, kind):
    # The agent's camera sees the floor where there is no table.
    suite, task = ("object", 0) if kind == "floor" else ("goal", 8)
    varied = make(suite, task_ids=task, variation=KINDS[kind], **SMALL)
    changed = {"agentview": 0, "wrist": 0}
    for (obs, info, qpos), (other, other_info, other_qpos) in zip(
        played_plainly(suite, task), play(varied), strict=True
    ):
        vector = other_info.pop("variation")
        assert vector.shape == (VARIATION_WIDTH,) and vector.dtype == np.float64
        assert_same(other_info, info)
        # States to the last bit: clutter is solid, but stands where nothing comes.
        np.testing.assert_array_equal(other_qpos, qpos)
        np.testing.assert_array_equal(other["proprio"], obs["proprio"])
        for camera in changed:
            changed[camera] += int((other[camera] != obs[camera]).sum())
    if kind == "wrist":
        assert changed["agentview"] == 0 < changed["wrist"]
    elif kind == "camera":
        assert changed["wrist"] == 0 < changed["agentview"]
    else:
        assert changed["agentview"] > 0


def test_off_is_off_whatever_others_in_the_thread_do(make):
    """One model and one renderer serve all: each environment sees its own look."""
    options = {"task_ids": [3, 8], **SMALL}
    expected = play(make("goal", **options), steps=1)
    shown = play(make("goal", variation=IMAGES_ONLY, **options), steps=1)
    assert "variation" not in expected[0][1]
    # In turn, interleaved: two looks and none, on the same scene.
    variations = None, IMAGES_ONLY, IMAGES_ONLY
    *envs, other = (make("goal", variation=v, **options) for v in variations)
    assert envs[0].renderer is None
    at = 0
    for episode in range(2):
        results = []
        for number, env in enumerate([*envs, other]):
            seed = (99 if number == 2 else 5) if episode == 0 else None
            results.append(env.reset(seed=seed))
        for result, records in zip(results, (expected, shown), strict=False):
            assert_same(copied(result[0]), records[at][0])
        at += 1
        rng = np.random.default_rng(episode)
        action = rng.uniform(-1, 1, envs[0].action_space.shape).astype(np.float32)
        for env, records in ((envs[0], expected), (other, None), (envs[1], shown)):
            obs, *_ = env.step(action)
            if records is not None:
                assert_same(copied(obs), records[at][0])
        at += 1
    assert envs[0].renderer is envs[1].renderer
    assert envs[0].sim._model is envs[1].sim._model
    assert (expected[0][0]["agentview"] != shown[0][0]["agentview"]).any()


def test_all_zero_is_the_same_as_none(make):
    assert DomainVariation.parse(DomainVariation()) is None
    assert DomainVariation.parse("none") is None and DomainVariation.parse(None) is None
    env = make("goal", variation=DomainVariation(), cameras=())
    assert env.variation is None and "variation" not in env.reset(seed=0)[1]


def test_seed_and_episode_decide_alone(make):
    kwargs = {"variation": "strong", "cameras": (), "init_states": "official"}
    env, again = (make("goal", task_ids=[1, 8], **kwargs) for _ in range(2))
    first = looks(env, 5)
    np.testing.assert_array_equal(first, looks(again, 5))
    assert len({vector.tobytes() for vector in first}) == 5
    assert not np.array_equal(looks(env, 1, seed=6)[0], first[0])
    # Any episode at once, whatever was played, and with a task of one's own choice.
    again.seek(5, 3)
    np.testing.assert_array_equal(again.reset()[1]["variation"], first[3])
    again.seek(5, 3)
    info = again.reset(options={"task_id": 4, "init_state_id": 7})[1]
    keep = slice(0, VARIATION_WIDTH - part(plain_vector(), "distractors").size)
    np.testing.assert_array_equal(info["variation"][keep], first[3][keep])


def test_each_group_of_fields_has_random_numbers_of_its_own():
    def drawn(**fields):
        return DomainVariation(**fields).draw(3, 1, None)

    light, both = drawn(light_intensity=0.5), drawn(light_intensity=0.5, camera_position=0.1)
    assert part(light, "light_intensity") == part(both, "light_intensity") != 1.0
    assert part(both, "camera_position").any() and not part(light, "camera_position").any()
    more = drawn(light_intensity=0.5, camera_position=0.1, object_color=0.5, table_color=1)
    np.testing.assert_array_equal(part(more, "camera_position"), part(both, "camera_position"))


def test_interval(make):
    env = make("goal", task_ids=8, variation=STRONG, scene_reset_interval=3, cameras=())
    vectors = looks(env, 7)
    for k, vector in enumerate(vectors):
        same = [np.array_equal(vector, other) for other in vectors]
        assert same == [j // 3 == k // 3 for j in range(7)]


def test_ranges_and_limits_of_what_is_drawn():
    bare = dataclasses.replace(STRONG, distractors=0)
    vectors = np.array([bare.draw(seed, 0, None) for seed in range(500)])

    def drawn(name):
        return np.array([part(vector, name) for vector in vectors])

    intensity = drawn("light_intensity")
    assert 0.6 <= intensity.min() < 0.65 and 1.35 < intensity.max() <= 1.4
    moved = np.linalg.norm(drawn("camera_position"), axis=1)
    assert moved.max() <= STRONG.camera_position < moved.max() * 1.05
    turned = np.linalg.norm(drawn("camera_rotation"), axis=1)
    assert turned.max() <= STRONG.camera_rotation < turned.max() * 1.05
    assert np.abs(drawn("camera_position").mean(axis=0)).max() < 0.005
    assert drawn("table_color")[:, 3].tolist() == [STRONG.table_color] * 500
    assert drawn("object_colors").min() >= 0.15 and drawn("object_colors").max() <= 1


def test_describe_names_every_number(make):
    env = make("object", task_ids=0, variation="strong", cameras=())
    info = env.reset(seed=1)[1]
    found = DomainVariation.describe(info["variation"])
    assert set(found) == set(PARTS)
    assert found["light_intensity"] == part(info["variation"], "light_intensity")
    assert len(found["distractors"]) == STRONG.distractors
    problem = env.task_model.task.problem
    used = {category for _, category in problem.objects + problem.fixtures}
    for category, x, y, turn in found["distractors"]:
        body = env.sim.body_pos(f"clutter_{category}_main")
        np.testing.assert_allclose(body[:2], (x, y), atol=1e-12)
        assert category in CLUTTER_KINDS and category not in used and abs(turn) <= 180
    unknown = info["variation"].copy()
    part(unknown, "distractors")[0, 0] = len(CLUTTER_KINDS)
    nans = np.full(VARIATION_WIDTH, np.nan)
    for wrong in (np.zeros(3), info["variation"][None], nans, None, unknown):
        with pytest.raises(ConfigError):
            DomainVariation.describe(wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"light_intensity": -0.1},
        {"light_intensity": 0.9},
        {"camera_rotation": float("nan")},
        {"camera_fov": "wide"},
        {"table_color": True},
        {"distractors": 7},
        {"distractors": 1.5},
    ],
)
def test_fields_out_of_range(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        DomainVariation(**fields)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"variation": "wild"},
        {"variation": 0.5},
        {"variation": {"light_intensity": 0.1}},
        {"scene_reset_interval": 0},
        {"scene_reset_interval": 1.5},
    ],
)
def test_bad_arguments(kwargs):
    with pytest.raises(ConfigError, match=r"variation|scene_reset_interval"):
        LiberoEnv("goal", **kwargs)
    with pytest.raises(ConfigError, match=r"variation|scene_reset_interval"):
        LiberoVectorEnv(2, "goal", workers=0, **kwargs)


VARIED = {**SMALL, "task_ids": [2, 8], "variation": "strong", "scene_reset_interval": 2}
VARIED |= {"depth": True, "segmentation": True}


def test_vector_equals_single(make):
    singles = [make("goal", env_index=i, **VARIED) for i in range(3)]
    references = [
        Reference(env, 70 + i, partial(random_action, i, env.action_space.shape))
        for i, env in enumerate(singles)
    ]
    envs = LiberoVectorEnv(3, "goal", workers=2, autoreset_mode=SAME_STEP, **VARIED)
    with contextlib.closing(envs):
        follow(envs, Follower(references, SAME_STEP), 70, episodes=3)


def test_a_step_lost_with_its_worker_says_which_variation_it_had(make):
    envs = LiberoVectorEnv(2, "goal", task_ids=8, workers=2, variation="mild", **SMALL)
    with contextlib.closing(envs):
        shown = envs.reset(seed=0)[1]["variation"]
        envs.step_async(np.zeros(envs.action_space.shape, np.float32))
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        with pytest.warns(WorkerRestartWarning, match="SIGKILL"):
            *_, truncated, infos = envs.step_wait()
        assert truncated.tolist() == [False, True] and infos["worker_restarted"][1]
        np.testing.assert_array_equal(infos["variation"], shown)
        _, _, _, _, infos = envs.step(np.zeros(envs.action_space.shape, np.float32))
        single = make("goal", task_ids=8, env_index=1, variation="mild", **SMALL)
        single.seek(1, 1)
        np.testing.assert_array_equal(infos["variation"][1], single.reset()[1]["variation"])


def test_a_state_goes_on_in_another_environment(make):
    kwargs = {**VARIED, "max_control_steps": 50}
    env, other = (make("goal", **kwargs) for _ in range(2))
    env.reset(seed=11)
    actions = [random_action(0, env.action_space.shape, 0, step) for step in range(3)]
    before = copied(env.step(actions[0])[0])
    state = env.get_state()
    expected = [before]
    for a in actions[1:]:
        obs, *_, info = env.step(a)
        expected.append((copied(obs), info))
    expected.append(env.reset())
    found = [copied(other.set_state(pickle.loads(pickle.dumps(state))))]
    for a in actions[1:]:
        obs, *_, info = other.step(a)
        found.append((copied(obs), info))
    assert_same([*found, other.reset()], expected)
    # An environment without variation goes on with the same pixels, and then on its own.
    plain = make("goal", **{**kwargs, "variation": None})
    assert_same(copied(plain.set_state(state)), before)
    obs, *_, info = plain.step(actions[1])
    assert_same((copied(obs), info), expected[1])
    assert "variation" not in plain.reset()[1]
    # And one of no variation goes on in an environment that has one, as it was.
    expected = plain.step(actions[0])[0]
    state = plain.get_state()
    shown = env.set_state(state)
    assert_same(copied(shown), copied(expected))


def test_the_lean_painter_draws_a_varied_scene_exactly():
    compare_painters("goal", 8, 96, looks=4, fast=True)


def compare_painters(suite, task_id, size, *, looks, fast, assets="lite"):
    model = load_task_model(get_task(suite, task_id), assets, clutter=True)
    sim, rng = LiberoSim(model), np.random.default_rng(1)
    images = []
    with contextlib.closing(PainterPair(sim._shared, size, fast=fast)) as pair:
        for k in range(looks):
            vector = STRONG.draw(k, 0, sim)
            sim.set_variation(None if k == looks - 1 else vector)
            sim.reset(model.official_layout(0))
            sim.run_chunk(rng.uniform(-1, 1, (4, 7)))
            sim.prepare_render()
            for camera in ("agentview", "robot0_eye_in_hand"):
                plain, lean = pair.draw(sim.data, fixed_camera(sim._model, camera))
                np.testing.assert_array_equal(plain, lean)
                assert plain.std() > 5
            images.append(plain)
    assert len({image.tobytes() for image in images}) == looks


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("suite", "task_id"), [("spatial", 0), ("object", 1), ("10", 0), ("10", 2), ("90", 80)]
)
def test_the_lean_painter_in_other_rooms(suite, task_id, fast):
    compare_painters(suite, task_id, 128, looks=8, fast=fast)


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.usefixtures("libero_assets_dir")
def test_the_lean_painter_on_the_real_meshes():
    compare_painters("goal", 8, 128, looks=6, fast=False, assets="libero")


def clutter_bodies(sim):
    """Root bodies of the clutter that is shown, by category."""
    shown = DomainVariation.describe(sim.variation)["distractors"]
    return {row[0]: sim._model.body(sim.task_model.clutter[row[0]]).id for row in shown}


def check_clear(env, seeds):
    """Clutter touches nothing at the start, stands on the table, in no region; return how many."""
    counts = []
    for seed in seeds:
        env.reset(seed=seed)
        sim, model = env.sim, env.sim._model
        bodies = clutter_bodies(sim)
        counts.append(len(bodies))
        root = model.body_rootid[model.geom_bodyid]
        contacts = sim.data.contact.geom
        assert not np.isin(root[contacts], list(bodies.values())).any()
        names = list(env.task_model.objects.items())
        for category, body in bodies.items():
            low, high = extent(sim, body)
            middle = (low[:2] + high[:2]) / 2
            for name, spec in names:
                other_low, other_high = extent(sim, model.body(spec.body).id)
                gap = np.maximum(other_low - high, low - other_high)[:2].max()
                assert gap > 0.01, f"{category} beside {name}: {gap}"
            for other in bodies.values():
                if other != body:
                    other_low, other_high = extent(sim, other)
                    assert np.maximum(other_low - high, low - other_high)[:2].max() > 0
            for placement in env.task_model.placements:
                if placement.reference is None:
                    x, y = placement.reference_pos[:2]
                    for a, b in zip(placement.x_ranges, placement.y_ranges, strict=True):
                        inside = a[0] <= middle[0] - x <= a[1] and b[0] <= middle[1] - y <= b[1]
                        assert not inside, f"{category} in the region of {placement.name}"
            # What holds it: straight below its middle is the table's top.
            start = np.array([*middle, low[2] + 0.002])
            hit, down = np.zeros(1, np.int32), np.array([0.0, 0.0, -1.0])
            groups = np.array([1, 1, 0, 0, 0, 0], np.uint8)
            distance = mujoco.mj_ray(model, sim.data, start, down, groups, 1, body, hit)
            assert 0 <= distance < 0.01, f"{category} stands {distance} m over the table"
    return counts


def extent(sim, root):
    """Corners of the box around the collision geoms of a body and what hangs on it."""
    model, data = sim._model, sim.data
    low, high = np.full(3, np.inf), np.full(3, -np.inf)
    for geom in np.flatnonzero(model.body_rootid[model.geom_bodyid] == root):
        if model.geom_contype[geom] or model.geom_conaffinity[geom]:
            points = geom_points(model, geom) @ data.geom_xmat[geom].reshape(3, 3).T
            points = points + data.geom_xpos[geom]
            low, high = np.minimum(low, points.min(0)), np.maximum(high, points.max(0))
    return low, high


ALL_CLUTTER = DomainVariation(distractors=6)


@pytest.mark.parametrize(("suite", "task_id"), [("goal", 3), ("object", 2)])
def test_clutter_is_in_nobodys_way(make, suite, task_id):
    env = make(suite, task_ids=task_id, variation=ALL_CLUTTER, cameras=())
    assert min(check_clear(env, range(3))) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_clutter_is_in_nobodys_way_in_any_task(suite):
    scenes = {}
    for task in suite_tasks(suite):
        env = LiberoEnv(suite, task_ids=task.task_id, variation=ALL_CLUTTER, cameras=())
        scenes.setdefault(task.scene_name, []).extend(check_clear(env, range(5)))
        env.close()
    assert min(np.mean(counts) for counts in scenes.values()) >= 1, scenes


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.usefixtures("libero_assets_dir")
@pytest.mark.parametrize(("suite", "task_id"), [("goal", 3), ("object", 2), ("10", 4), ("90", 80)])
def test_clutter_is_in_nobodys_way_on_the_real_meshes(make, suite, task_id):
    env = make(suite, task_ids=task_id, assets="libero", variation=ALL_CLUTTER, cameras=())
    assert min(check_clear(env, range(5))) >= 1


def seen_of(sim, camera, size=96):
    """How many pixels of each object or fixture a camera sees."""
    renderer = mujoco.Renderer(sim._model, size, size)
    renderer.enable_segmentation_rendering()
    option = mujoco.MjvOption()
    option.geomgroup[0] = 0
    sim.prepare_render()
    renderer.update_scene(sim.data, camera, scene_option=option)
    image = renderer.render()
    renderer.close()
    kinds = image[..., 1] == int(mujoco.mjtObj.mjOBJ_GEOM)
    geoms = image[..., 0][kinds]
    roots = sim._model.body_rootid[sim._model.geom_bodyid[geoms]]
    return {
        name: int((roots == sim._model.body(spec.body).id).sum())
        for name, spec in sim.task_model.objects.items()
    }


@pytest.mark.parametrize(
    ("suite", "task_id"),
    [("goal", 3), ("object", 2), pytest.param("10", 4, marks=pytest.mark.slow)],
)
def test_clutter_hides_nothing_from_the_agents_camera(suite, task_id):
    model = load_task_model(get_task(suite, task_id), "lite", clutter=True)
    sim, vector = LiberoSim(model), plain_vector()
    for state in range(3):
        sim.set_variation(None)
        sim.reset(model.official_layout(state))
        expected = seen_of(sim, "agentview")
        part(vector, "distractors")[:] = sim.place_distractors(6, np.random.default_rng(state))
        sim.set_variation(vector)
        sim.reset(model.official_layout(state))
        found = seen_of(sim, "agentview")
        assert found == expected and min(found.values()) > 0


def test_official_states_and_goals_are_those_of_the_plain_scene(make):
    """Same states, snapshots and success along a whole episode, clutter or not."""
    plain = make("goal", task_ids=8, cameras=())
    cluttered = make("goal", task_ids=8, cameras=(), variation=ALL_CLUTTER)
    ends = []
    for env in (plain, cluttered):
        _, info = env.reset(seed=0, options={"init_state_id": 4})
        assert info["init_state_id"] == 4
        expert = make_expert(env.sim)
        over, path = False, [env.sim.qpos]
        while not over:
            _, _, terminated, truncated, info = env.step(expert.act())
            over = terminated or truncated
            path.append(env.sim.qpos)
        ends.append((info["success"], np.array(path)))
    assert ends[0][0] and ends[1][0]
    np.testing.assert_array_equal(ends[0][1], ends[1][1])
    models = plain.task_model, cluttered.task_model
    assert models[0].scene_key != models[1].scene_key and not models[0].clutter
    np.testing.assert_array_equal(models[0].init_states, models[1].init_states)
    assert plain.sim.qpos.shape == cluttered.sim.qpos.shape


def test_clutter_is_solid():
    """A bowl that is put into clutter is pushed out of it; one in clutter that is hidden is not."""
    model = load_task_model(get_task("goal", 8), "lite", clutter=True)
    sim, vector = LiberoSim(model), plain_vector()
    rows = sim.place_distractors(1, np.random.default_rng(0))
    layout = model.official_layout(0)
    address, ends = model.free_qpos["akita_black_bowl_1"], []
    layout.qpos[address : address + 2] = rows[0, 1:3]
    for shown in (False, True):
        part(vector, "distractors")[:] = rows if shown else part(plain_vector(), "distractors")
        sim.set_variation(vector)
        sim.reset(layout)
        sim.run_chunk(np.tile(NOOP, (20, 1)))
        ends.append(sim.qpos[address : address + 3])
    assert np.linalg.norm(ends[0][:2] - rows[0, 1:3]) < 0.01 < np.linalg.norm(ends[1] - ends[0])


def test_clutter_of_another_scene_is_refused():
    sim = LiberoSim(load_task_model(get_task("goal", 8), "lite"))
    vector = plain_vector()
    part(vector, "distractors")[0] = 0, 0.1, 0.1, 0
    with pytest.raises(ConfigError, match="red_coffee_mug"):
        sim.set_variation(vector)
    with pytest.raises(ConfigError, match="numbers"):
        sim.set_variation(np.zeros(4))
    assert sim.variation is None


def test_play_and_demos_take_a_level(tmp_path):
    config = PlayConfig(policy="random", init_state_ids=(0, 1), max_steps=2, size=64)
    frames = []
    for level in (None, "strong"):
        config = replace(config, variation=level, out=tmp_path / f"{level}.gif")
        assert len(play_video(config)) == 2
        frames.append(imageio.imread(config.out, index=0))
    assert frames[0].shape == frames[1].shape and (frames[0] != frames[1]).mean() > 0.1
    with pytest.raises(ConfigError, match="wild"):
        play_video(replace(config, variation="wild"))
    demos = DemosConfig(
        str(tmp_path), task_ids=(7,), num_demos=2, image_size=32, num_workers=0, variation="mild"
    )
    (path,) = record_demos(demos, progress=False)
    with h5py.File(path) as file:
        vectors = [file[f"data/demo_{k}"].attrs["variation"] for k in range(2)]
    found = [DomainVariation.describe(vector) for vector in vectors]
    assert found[0]["distractors"] and found[0]["light_intensity"] != found[1]["light_intensity"]
    with pytest.raises(ConfigError, match="variation"):
        record_demos(replace(demos, variation=None), progress=False)
