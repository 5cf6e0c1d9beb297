"""What ``reset`` and ``step`` return equals what upstream's return: every pixel, every number.

So do the states behind it, bit for bit, with ``physics="exact"``.

Upstream takes the path of LIBERO's evaluations: ``reset``, ``set_init_state``, ten no-ops, actions.
The default run plays the first steps of one task, without images to its end in test_parity.py; the
``slow`` test plays whole episodes of eighteen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from upstream import CAMERAS, Upstream, random_actions

from vla_gym.cli import known_episode
from vla_gym.envs.libero import LiberoEnv
from vla_gym.experts import EXPERT_TASKS, make_expert
from vla_gym.sim import LiberoSim
from vla_gym.sim.libero_sim import NOOP
from vla_gym.suites import get_task
from vla_gym.suites.libero import Layout, TaskModel, load_task_model
from vla_gym.suites.libero.protocols import PROTOCOLS, ProtocolName

pytestmark = pytest.mark.libero_assets

CHUNK = 8
# All of goal, two of every other suite: a stove that is on, drawers, a microwave.
TASKS = [
    *(("goal", task_id) for task_id in range(10)),
    ("spatial", 3),
    ("spatial", 4),
    ("object", 0),
    ("object", 7),
    ("10", 2),
    ("10", 9),
    ("90", 37),
    ("90", 71),
]


def actions_of(model: TaskModel, layout: Layout, count: int) -> np.ndarray:
    """Return at most ``count`` actions (T, 7): the expert's, to success, or else wandering ones."""
    task = model.task
    if task.task_id not in EXPERT_TASKS.get(task.suite, ()):
        return random_actions(min(count, 120), 0)
    sim, actions = LiberoSim(model, physics="exact"), []
    sim.reset(layout)
    expert = make_expert(sim)
    while len(actions) < count:
        actions.append(expert.act())
        if sim.step(actions[-1]):
            break
    return np.array(actions)


def images_of(observation: dict[str, np.ndarray]) -> np.ndarray:
    return np.stack([observation["agentview"], observation["wrist"]])


def check_observations(
    upstream: Upstream,
    suite: str,
    task_id: int,
    count: int,
    size: int,
    protocol: ProtocolName = "openvla",
) -> int:
    """Compare an episode of single steps and one of chunks; return the number of images."""
    rules = PROTOCOLS[protocol]
    options = {"task_id": task_id, "init_state_id": 7}
    kwargs = {"assets": "libero", "physics": "exact", "image_size": size, **rules.env_kwargs()}
    env = LiberoEnv(suite, **kwargs)
    observation, _ = env.reset(seed=0, options=options)
    model, layout = env.task_model, env.task_model.official_layout(7)
    actions = actions_of(model, layout, count).astype(np.float32)
    steps = rules.settle_steps
    settle = np.repeat(np.append(NOOP[:6], rules.settle_gripper)[None], steps, axis=0)

    upstream.build(suite, task_id, image_size=size)
    first = upstream.start(layout, model.fixtures, through_reset=True)
    theirs = upstream.steps(np.concatenate([settle, actions]), observe=True)
    shown, numbers = theirs["images"][steps - 1 :], theirs["proprio"][steps - 1 :]

    def compare(env: LiberoEnv, found: dict[str, np.ndarray], step: int) -> None:
        where = f"{suite} {task_id}, control step {step}"
        for name in ("qpos", "qvel"):
            state = getattr(env.sim, name)
            np.testing.assert_array_equal(state, theirs[name][steps - 1 + step], err_msg=where)
        np.testing.assert_array_equal(images_of(found), shown[step], err_msg=where)
        np.testing.assert_array_equal(
            found["proprio"], numbers[step].astype(np.float32), err_msg=where
        )

    compare(env, observation, 0)
    for step, action in enumerate(actions, 1):
        observation, _, success, *_ = env.step(action)
        compare(env, observation, step)
        assert success == theirs["success"][steps - 1 + step]

    chunked = LiberoEnv(suite, chunk_len=CHUNK, **kwargs)
    chunked.reset(seed=0, options=options)
    for end in range(CHUNK, len(actions) + 1, CHUNK):
        compare(chunked, chunked.step(actions[end - CHUNK : end])[0], end)
    # A state that is saved and restored shows the same again.
    state = chunked.get_state()
    chunked.step(np.zeros((CHUNK, 7), np.float32)) if not state.needs_reset else None
    compare(chunked, chunked.set_state(state), len(actions) // CHUNK * CHUNK)

    # And LIBERO's observation before it settles.
    env.sim.reset(layout, settle=False)
    images = np.empty((2, size, size, 3), np.uint8)
    env.renderer.render(env.sim, images, CAMERAS)
    np.testing.assert_array_equal(images, first["images"])
    np.testing.assert_array_equal(env.sim.proprio(), first["proprio"].astype(np.float32))
    for made in (env, chunked):
        made.close()
    return len(actions) + 1


def test_observations(upstream: Upstream) -> None:
    check_observations(upstream, "goal", 7, count=40, size=64)


def test_observations_of_liberos_own_protocol(upstream: Upstream) -> None:
    """Five steps of zeros come before: the fingers stay where the official state has them."""
    check_observations(upstream, "goal", 7, count=8, size=64, protocol="libero")


@pytest.mark.parametrize("protocol", [pytest.param("openvla", marks=pytest.mark.slow), "libero"])
def test_the_doctors_known_episodes_are_upstreams(
    upstream: Upstream, protocol: ProtocolName
) -> None:
    """Which physics="fast" and llvmpipe play and draw; "openpi" has the world of "openvla"."""
    rules, task = PROTOCOLS[protocol], ("goal", known_episode.TASK_ID)
    model = load_task_model(get_task(*task), "libero")
    layout = model.official_layout(known_episode.INIT_STATE_ID)
    upstream.build(*task, image_size=rules.image_size)
    upstream.start(layout, model.fixtures, through_reset=True)
    noop, steps = np.append(NOOP[:6], rules.settle_gripper), rules.settle_steps
    actions = np.concatenate([np.tile(noop, (steps, 1)), known_episode.ACTIONS])
    theirs = upstream.steps(actions, observe=True)
    known = json.loads(known_episode.KNOWN.read_text())["libero"]
    shown = np.concatenate([theirs["images"][steps - 1], theirs["images"][-1]])
    found = {
        "qpos": theirs["qpos"][-1],
        "images": known_episode.blocks_of(shown),
        "renderer": "llvmpipe",
    }
    same, text = known_episode.judge(found, known[protocol])
    assert same and "images within 0 of 255" in text, text
    assert known["openpi"] == known["openvla"]


def test_observations_of_a_steps_end_are_others(libero_assets_dir: Path) -> None:
    env = LiberoEnv("goal", assets=libero_assets_dir, image_size=64)
    late = LiberoEnv("goal", assets=libero_assets_dir, image_size=64, observation_timing="end")
    action = np.array([1, 0, 0, 0, 0, 0, -1], np.float32)
    for each in (env, late):
        each.reset(seed=0, options={"task_id": 7, "init_state_id": 7})
    for _ in range(4):
        observation, end = env.step(action)[0], late.step(action)[0]
    np.testing.assert_array_equal(env.sim.qpos, late.sim.qpos)
    ahead = end["proprio"][0] - observation["proprio"][0]
    assert 1e-4 < ahead < 5e-3  # 4 ms of a hand that moves
    assert (images_of(end) != images_of(observation)).any()
    for each in (env, late):
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), TASKS)
def test_observations_of_whole_episodes(upstream: Upstream, suite: str, task_id: int) -> None:
    images = check_observations(upstream, suite, task_id, count=300, size=128)
    print(f"{suite} {task_id}: {images} observations equal")  # noqa: T201
