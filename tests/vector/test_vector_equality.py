"""Vectorised LIBERO equals single environments exactly, whatever the workers and the others do."""

from __future__ import annotations

import os
import signal
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from trees import assert_same
from vector_reference import (
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    Follower,
    Reference,
    advance,
    by_mode,
    copied,
    follow,
    random_action,
    rows,
)

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import WorkerRestartWarning
from vla_gym.vector import LiberoVectorEnv

TURN_ON_STOVE = 7
SEED = 300
# A whole chunk and a half one: every test plays many of them.
IMAGES = {"image_size": 64, "chunk_len": 8, "max_control_steps": 12, "gamma": 0.99}
STATE_ONLY = {**IMAGES, "cameras": ()}
#: Each env its own list.
TASKS = [[7, 8], [0, 3, 5], [1], [2, 9]]

pytestmark = pytest.mark.usefixtures("warm_server")

#: The others run with the slow tests; tests on stubs have them all.
mostly_next_step = pytest.mark.parametrize(
    "mode",
    [NEXT_STEP, *(pytest.param(mode, marks=pytest.mark.slow) for mode in (SAME_STEP, DISABLED))],
    ids=lambda mode: mode.name,
)


class Singles:
    """Single environments by their arguments, each with what it has played so far."""

    def __init__(self) -> None:
        self.known: dict[str, Reference] = {}

    def reference(self, i: int, tasks, suite="goal", seed=SEED, wrapper=None, **kwargs):
        key = repr((i, tasks, suite, seed, wrapper, sorted(kwargs.items())))
        if key not in self.known:
            env = LiberoEnv(suite, task_ids=tasks, env_index=i, **kwargs)
            env = wrapper(env) if wrapper else env
            play = partial(random_action, i, env.action_space.shape)
            self.known[key] = Reference(env, seed + i, play)
        return self.known[key]

    def follower(self, mode, tasks=TASKS, **kwargs) -> Follower:
        return Follower([self.reference(i, own, **kwargs) for i, own in enumerate(tasks)], mode)


@pytest.fixture(scope="module")
def singles():
    singles = Singles()
    yield singles
    for reference in singles.known.values():
        reference.env.close()


@pytest.fixture
def make_vec():
    made = []

    def make(tasks=TASKS, suite="goal", **kwargs):
        envs = LiberoVectorEnv(len(tasks), suite, task_ids=tasks, **kwargs)
        made.append(envs)
        return envs

    yield make
    for envs in made:
        envs.close()


@pytest.mark.parametrize(
    ("mode", "workers"),
    [(NEXT_STEP, 2), (SAME_STEP, 0), (DISABLED, 1)],
    ids=str,
)
def test_every_mode_and_worker_count(make_vec, singles, mode, workers):
    """Observations, rewards, flags, infos and statistics of two episodes an env, mixed tasks."""
    envs = make_vec(workers=workers, autoreset_mode=mode, **IMAGES)
    assert np.bincount(envs.worker_of).tolist() == [4 // max(workers, 1)] * max(workers, 1)
    follow(envs, singles.follower(mode, **IMAGES), SEED, episodes=2, stagger=[0, 3])


def test_official_states_without_images_in_single_steps(make_vec, singles):
    kwargs = {"cameras": (), "max_control_steps": 5, "init_states": "official"}
    envs = make_vec(workers=3, autoreset_mode=NEXT_STEP, **kwargs)
    assert set(envs.single_observation_space) == {"proprio", "task_id"}
    assert envs.action_space.shape == (4, 7)
    expected = singles.follower(NEXT_STEP, **kwargs)
    follow(envs, expected, SEED, episodes=3)
    official = expected.references[3][2][0].info["init_state_id"]
    assert official == (SEED + 3 + 2) % 50


@mostly_next_step
def test_views_of_images_drawn_in_place(make_vec, singles, mode):
    envs = make_vec(workers=2, autoreset_mode=mode, copy=False, **IMAGES)
    expected = singles.follower(mode, **IMAGES)
    follow(envs, expected, SEED, episodes=2)
    if mode == DISABLED:
        return
    result = envs.step(expected.actions())
    for _ in range(4):  # views of either half of the double buffer
        expected.check_step(result)
        before, kept = result[0], copied(result[0])
        result = envs.step(expected.actions())
        assert_same(before, kept, "the last but one step's view")


@pytest.mark.libero_assets
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_several_scenes_in_one_env(make_vec, singles, workers):
    """libero_10 has a scene for nearly every task; the LRU keeps two of three here."""
    tasks = [[0, 3, 5], [5, 0], [3], [0, 5, 3]]
    kwargs = {**IMAGES, "task_sampling": "round_robin", "suite": "10", "assets": "libero"}
    kwargs |= {"cameras": ("wrist",), "max_control_steps": 8}
    envs = make_vec(tasks, workers=workers, scene_cache_size=2, start_timeout=600, **kwargs)
    follow(envs, singles.follower(NEXT_STEP, tasks, **kwargs), SEED, episodes=5)


@pytest.mark.libero_assets
@pytest.mark.slow
@by_mode
def test_real_assets(make_vec, singles, mode):
    kwargs = {**IMAGES, "assets": "libero"}
    envs = make_vec(workers=2, autoreset_mode=mode, **kwargs)
    follow(envs, singles.follower(mode, **kwargs), SEED, episodes=2)


def test_wrappers_that_keep_images(make_vec, singles):
    class LastFrame(gym.Wrapper):
        """Shows the image before: a wrapper that keeps what it is given."""

        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            self.kept = obs["agentview"]
            return obs, info

        def step(self, action):
            obs, *rest = self.env.step(action)
            self.kept, shown = obs["agentview"], self.kept
            return {**obs, "agentview": shown}, *rest

    envs = make_vec(workers=2, env_wrappers=[LastFrame], **IMAGES)
    follow(envs, singles.follower(NEXT_STEP, wrapper=LastFrame, **IMAGES), SEED, episodes=2)


# Success: random actions never succeed, so an expert's are played.


def stove_chunks():
    """Chunks that turn the stove on from official state 0, and the length of the episode."""
    from vla_gym.experts import make_expert

    env = LiberoEnv("goal", task_ids=TURN_ON_STOVE, cameras=())
    env.reset(seed=0, options={"init_state_id": 0})
    expert, actions, terminated = make_expert(env.sim), [], False
    while not terminated:
        actions.append(expert.act().astype(np.float32))
        _, _, terminated, truncated, _ = env.step(actions[-1])
        assert not truncated
    env.close()
    chunks = np.zeros((-(-len(actions) // 8), 8, 7), np.float32)
    chunks.reshape(-1, 7)[: len(actions)] = actions
    return chunks, len(actions)


def test_success_in_one_env_while_another_goes_on(make_vec):
    chunks, length = stove_chunks()
    kwargs = {"chunk_len": 8, "gamma": 0.99, "cameras": (), "max_control_steps": length + 24}
    tasks, options = [[8], [TURN_ON_STOVE]], {"init_state_id": 0}

    def expert(episode, step):
        return chunks[step] if episode == 0 else random_action(1, (8, 7), episode, step)

    plays = [partial(random_action, 0, (8, 7)), expert]
    references = [
        Reference(LiberoEnv("goal", task_ids=own, env_index=i, **kwargs), i, plays[i], options)
        for i, own in enumerate(tasks)
    ]
    expected = Follower(references, SAME_STEP)
    envs = make_vec(tasks, workers=2, autoreset_mode=SAME_STEP, **kwargs)
    expected.check_reset(envs.reset(seed=0, options=options))
    for _ in range(len(chunks)):
        result = envs.step(expected.actions())
        expected.check_step(result)
    assert result[2].tolist() == [False, True] and not result[3].any()
    assert result[1][1] == pytest.approx(0.99 ** ((length - 1) % 8))
    stats = result[4]["episode_stats"]
    assert (stats["success"][1], stats["length"][1]) == (True, length)
    advance(envs, expected, 3)


# Others


@mostly_next_step
def test_a_killed_worker_changes_nothing_for_others(make_vec, singles, mode):
    """Killed over a chunk; its own envs go on with the next episode as if it had ended."""
    envs = make_vec(workers=4, autoreset_mode=mode, **IMAGES)
    expected = singles.follower(mode, **IMAGES)
    expected.check_reset(envs.reset(seed=SEED))
    expected.check_step(envs.step(expected.actions()))
    os.kill(envs.worker_pids[1], signal.SIGSTOP)  # a fast one would be done before it is killed
    envs.step_async(expected.actions())
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning, match="SIGKILL"):
        result = envs.step_wait()
    expected.check_step(result, lost=[1])
    while min(expected.finished) < 3:
        advance(envs, expected)
    assert expected.lost == [0, 1, 0, 0]


# Tasks


def test_groups_play_the_same(make_vec, singles):
    """Also where a group's members are in different workers."""
    tasks = [[7, 8, 2]] * 6
    kwargs = {**STATE_ONLY, "max_control_steps": 8, "task_sampling": "balanced", "group_size": 3}
    envs = make_vec(tasks, workers=3, autoreset_mode=SAME_STEP, **kwargs)
    expected = singles.follower(SAME_STEP, tasks, **kwargs)
    result = envs.reset(seed=SEED)
    expected.check_reset(result)
    for _ in range(3):
        obs = result[0]
        for group in (slice(0, 3), slice(3, 6)):
            for array in obs.values():
                assert (array[group] == array[group][:1]).all()
        assert not np.array_equal(obs["proprio"][0], obs["proprio"][3])
        result = envs.step(expected.actions())  # every step ends all episodes
        expected.check_step(result)
        assert result[3].all()
        assert not np.array_equal(result[4]["final_obs"][0]["proprio"], obs["proprio"][1])


def test_weights_that_are_set_on_the_way_hold_as_for_single_environments(make_vec):
    """From the next episode on, in workers and alone; every step ends an episode here."""
    kwargs, weights = {**STATE_ONLY, "max_control_steps": 4}, {0: 0.1, 3: 0.0, 8: 0.0}
    envs = make_vec([range(10)] * 2, workers=2, autoreset_mode=SAME_STEP, **kwargs)
    played = [envs.reset(seed=SEED)[0]["task_id"]]
    for step in range(15):
        if step == 4:
            envs.call("set_task_weights", weights)
        played.append(envs.step(np.zeros((2, 8, 7), np.float32))[0]["task_id"])
    for i, mine in enumerate(np.transpose(played)):
        env = LiberoEnv("goal", env_index=i, **kwargs)
        alone = [env.reset(seed=SEED + i)[0]["task_id"]] + [
            env.reset()[0]["task_id"] for _ in "1234"
        ]
        env.set_task_weights(weights)
        alone += [env.reset()[0]["task_id"] for _ in range(11)]
        env.close()
        assert alone == mine.tolist() and not {3, 8} & set(alone[5:])


def test_options_of_each_env(make_vec):
    envs = make_vec([[7, 8]] * 4, workers=2, **STATE_ONLY)
    mine = LiberoEnv("goal", task_ids=[7, 8], **STATE_ONLY)
    options = {"task_id": [8, 7, -1, 0], "init_state_id": np.array([3, -1, 5, 9])}
    obs, infos = envs.reset(seed=SEED, options=options)
    for i, own in enumerate(({"task_id": 8, "init_state_id": 3}, {"task_id": 7})):
        wanted, info = mine.reset(seed=SEED + i, options=own)
        assert_same(rows(obs, i), wanted)
        assert (infos["task_id"][i], infos["init_state_id"][i]) == (
            info["task_id"],
            info["init_state_id"],
        )
    assert infos["init_state_id"].tolist() == [3, -1, 5, 9] and infos["task_id"][3] == 0
    mine.close()


def test_a_state_takes_its_place_in_the_group_along(make_vec, singles):
    tasks = [[7, 8, 2]] * 4
    kwargs = {**STATE_ONLY, "max_control_steps": 8, "group_size": 2, "task_sampling": "balanced"}
    envs = make_vec(tasks, workers=2, autoreset_mode=SAME_STEP, **kwargs)
    expected = singles.follower(SAME_STEP, tasks, **kwargs)
    expected.check_reset(envs.reset(seed=SEED))
    envs.set_state(envs.get_state([1]), [2])
    expected.references[2], expected.last[2] = expected.references[1], expected.last[1]
    advance(envs, expected, 3)


def test_render_and_calls_leave_the_episode_alone(make_vec, singles):
    kwargs = {**IMAGES, "render_mode": "rgb_array"}
    envs = make_vec(workers=2, **kwargs)
    assert envs.render_mode == "rgb_array"
    expected = singles.follower(NEXT_STEP, **kwargs)
    result = envs.reset(seed=SEED)
    expected.check_reset(result)
    for _ in range(3):
        frames = envs.render()
        assert len(frames) == 4 and isinstance(frames, tuple)
        assert_same(frames, tuple(result[0]["agentview"]))
        assert envs.get_attr("chunk_len") == (8,) * 4
        result = envs.step(expected.actions())
        expected.check_step(result)
