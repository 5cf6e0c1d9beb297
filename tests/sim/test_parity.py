"""Parity with upstream LIBERO on the real meshes: the model, the fast loop, success.

Both sides use the same compiled model, fixture placement and null-space target. The default run
looks at one task; the ``slow`` tests are the full comparison (all ten goal tasks). Exact physics of
whole episodes of all of them: test_observation_parity.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from upstream import Upstream, assert_same_steps, model_arrays, random_actions

from vla_gym.experts import make_expert
from vla_gym.sim import LiberoSim, Snapshot
from vla_gym.sim.libero_sim import NOOP
from vla_gym.suites import get_task
from vla_gym.suites.libero import TaskModel, load_task_model

pytestmark = pytest.mark.libero_assets

ALL_TASKS = range(10)
SETTLE = np.repeat(NOOP[None], 10, axis=0)
# One control step of the fast loop from the same state, in metres and radians.
FAST_TOLERANCE = 1e-9


def load(task_id: int) -> TaskModel:
    return load_task_model(get_task("goal", task_id), assets="libero")


def expert_actions(model: TaskModel, init_state_id: int, noise: float = 0.0) -> np.ndarray:
    """Return the actions of one expert episode after settling, (T, 7), until success."""
    sim = LiberoSim(model)
    sim.reset(model.official_layout(init_state_id))
    expert, rng, actions = make_expert(sim), np.random.default_rng(init_state_id), []
    for _ in range(model.task.max_control_steps):
        action = expert.act()
        action[:3] += rng.normal(0, noise, 3)
        actions.append(action)
        if sim.step(action):
            break
    return np.array(actions)


def snapshots_along(model: TaskModel, actions: np.ndarray, every: int) -> list[Snapshot]:
    """Return states before every ``every``-th action of an episode from official state 0."""
    sim = LiberoSim(model)
    sim.reset(model.official_layout(0))
    states = []
    for index, action in enumerate(actions):
        if index % every == 0:
            states.append(sim.get_state())
        sim.step(action)
    return states


def check_fast_steps(upstream: Upstream, task_id: int, count: int) -> np.ndarray:
    """Return max |dqpos| of single control steps from ``2 * count`` synced states.

    NaN stands for more than the tolerance in a state where upstream's own result is not determined.
    """
    model = load(task_id)
    upstream.build("goal", task_id)
    expert = expert_actions(model, 0)
    every = max(1, len(expert) // count)
    sources = [
        snapshots_along(model, expert, every)[:count],
        snapshots_along(model, random_actions(4 * count, task_id), 4)[:count],
    ]
    states = [state for source in sources for state in source]
    actions = np.concatenate(
        [expert[::every][: len(sources[0])], random_actions(len(sources[1]), 100 + task_id)]
    )
    theirs = upstream.step_from(states, actions, model.fixtures)
    sim, errors = LiberoSim(model), []
    for state, action, qpos in zip(states, actions, theirs, strict=True):
        sim.set_state(state)
        sim.step(action)
        error = np.abs(sim.qpos - qpos).max()
        if error > FAST_TOLERANCE and effect_of_rounding(model, state, action) > FAST_TOLERANCE:
            error = np.nan
        errors.append(error)
    return np.array(errors)


def effect_of_rounding(model: TaskModel, state: Snapshot, action: np.ndarray) -> float:
    """Return how far the last bit of the arm's joints moves upstream's next state, max |dqpos|."""
    sim, rng, ends = LiberoSim(model, physics="exact"), np.random.default_rng(0), []
    for epsilon in [0.0] + [np.finfo(float).eps] * 8:
        sim.set_state(state)
        joints = model.robot.joint_qpos
        sim._data.qpos[joints] *= 1.0 + rng.choice([-epsilon, epsilon], len(joints))
        sim.step(action)
        ends.append(sim.qpos.copy())
    return float(np.abs(np.array(ends) - ends[0]).max())


def test_the_cached_model_is_upstreams(upstream: Upstream) -> None:
    upstream.build("goal", 8)
    model = load(8)
    ours, theirs = model_arrays(LiberoSim(model)._model), upstream.model_arrays()
    assert ours.keys() == theirs.keys()
    # Fixture poses belong to the layout, paths of mesh and texture files to the machine.
    own = {"body_pos", "body_quat", "site_rgba", "mesh_pathadr", "tex_pathadr", "paths"}
    different = {k for k in ours if not np.array_equal(ours[k], theirs[k], equal_nan=True)}
    assert different <= own
    moved = np.flatnonzero(np.any(ours["body_pos"] != theirs["body_pos"], axis=1))
    fixtures = [model.objects[name].body for name in model.fixtures]
    allowed = {LiberoSim(model)._model.body(body).id for body in fixtures}
    assert set(moved) <= allowed


def test_exact_episode(upstream: Upstream) -> None:
    """A whole episode bit for bit; with images: test_observation_parity.py."""
    model = load(8)
    layout = model.official_layout(0)
    actions = np.concatenate([SETTLE, expert_actions(model, 0)])
    upstream.build("goal", 8)
    upstream.start(layout, model.fixtures)
    theirs = upstream.steps(actions)
    sim = LiberoSim(model, physics="exact")
    sim.reset(layout, settle=False)
    assert_same_steps(sim, actions, theirs, "goal 8")


def test_fast_single_steps(upstream: Upstream) -> None:
    assert check_fast_steps(upstream, 8, count=10).max() <= FAST_TOLERANCE


@pytest.mark.slow
def test_fast_single_steps_of_every_task(upstream: Upstream) -> None:
    errors = np.concatenate([check_fast_steps(upstream, task, count=25) for task in ALL_TASKS])
    print(  # noqa: T201
        f"{len(errors)} states, max |dqpos| {np.nanmax(errors):.1e}, "
        f"equal {np.mean(errors == 0):.1%}, not determined {np.isnan(errors).sum()}"
    )
    assert len(errors) >= 500
    assert np.nanmax(errors) <= FAST_TOLERANCE
    # Seen: two of 500, the arm pressing down; there upstream's next state hangs on the last bit.
    assert np.isnan(errors).mean() <= 0.01


@pytest.mark.slow
def test_success_agrees_in_97_of_100_episodes(upstream: Upstream) -> None:
    agreement = []
    for task_id in ALL_TASKS:
        model, divergence, same = load(task_id), [], 0
        upstream.build("goal", task_id)
        for state in range(10):
            actions = expert_actions(model, state, noise=0.15)
            layout = model.official_layout(state)
            upstream.start(layout, model.fixtures)
            theirs = upstream.steps(np.concatenate([SETTLE, actions]))
            sim = LiberoSim(model)
            sim.reset(layout)
            executed, success = sim.run_chunk(actions)
            same += success == bool(theirs["success"][-1]) and executed == len(actions)
            divergence.append(np.abs(sim.qpos - theirs["qpos"][-1]).max())
        print(f"task {task_id}: agree {same}/10, max |dqpos| {max(divergence):.1e}")  # noqa: T201
        # Contact is chaotic: one episode of ten may part ways.
        assert same >= 9
        agreement.append(same)
    assert sum(agreement) >= 97
