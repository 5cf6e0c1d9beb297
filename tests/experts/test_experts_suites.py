"""Scripted experts on whole tasks, grasps, parts of long tasks, and the page of counts."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import measure_experts
import numpy as np
import pytest

from vla_gym.experts import Expert, Phase, make_expert
from vla_gym.experts.geometry import GRIPPER_DOWN, rotation_x
from vla_gym.experts.grasps import rim_grasp, tilted_rim_grasp
from vla_gym.experts.long_tasks import SETTLE, in_order, part
from vla_gym.experts.pick_and_place import repeated_until_success
from vla_gym.rollout import ExpertPolicy, Start, play
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.sim import LiberoSim
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model

ALL_TASKS = [(suite, i) for suite in ("goal", "spatial", "object", "10") for i in range(10)]


def success_rate(assets: str, suite: str, task_id: int, init_state_ids: range) -> float:
    task_model = load_task_model(get_task(suite, task_id), assets)
    sim = LiberoSim(task_model)
    wins = 0
    for init_state_id in init_state_ids:
        sim.reset(task_model.official_layout(init_state_id))
        expert = make_expert(sim)
        wins += any(sim.step(expert.act()) for _ in range(task_model.task.max_control_steps))
    return wins / len(init_state_ids)


def test_phases_begin_anew_until_the_goal_is_reached() -> None:
    outcomes = iter([False, False, True])
    sim = SimpleNamespace(
        eef_pose=lambda: (np.zeros(3), GRIPPER_DOWN), success=lambda: next(outcomes)
    )
    phases = [Phase("pick", lambda: np.ones(3), max_steps=2), Phase("put", lambda: np.zeros(3))]
    expert = Expert(sim, repeated_until_success(sim, phases))
    names = []
    for _ in range(12):
        expert.act()
        names.append(expert.phase)
    assert names == ["pick", "pick", "put"] * 3 + ["rest"] * 3
    assert expert.retries == 2


def test_a_part_is_repeated_until_its_own_condition_holds() -> None:
    outcomes = {0: iter([False, True]), 1: iter([True])}
    conditions = [SimpleNamespace(holds=lambda _, i=i: next(outcomes[i])) for i in range(2)]
    sim = SimpleNamespace(
        eef_pose=lambda: (np.zeros(3), GRIPPER_DOWN),
        task_model=SimpleNamespace(goal=conditions),
        data=None,
    )
    phases = [Phase("pick", lambda: np.ones(3), max_steps=2), Phase("put", lambda: np.zeros(3))]
    expert = Expert(sim, in_order(part(sim, "a", phases, 0), part(sim, "b", phases, 1)))
    names = [expert.phase for _ in range(3 * (2 + SETTLE) + 2) if expert.act() is not None]
    twice = ["a: pick"] * 2 + ["a: put"] * SETTLE
    once = ["b: pick"] * 2 + ["b: put"] * SETTLE
    assert names == [*twice, *twice, *once, "rest", "rest"]
    assert expert.retries == 1


def test_a_bowl_that_stands_askew_is_taken_along_its_own_axis() -> None:
    position, tilt = np.array([0.1, 0.2, 0.9]), rotation_x(0.3)
    signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, 8).T
    local = signs * [0.05, 0.05, 0.025] + [0.0, 0.0, 0.025]

    def bowl(rotation: np.ndarray) -> SimpleNamespace:
        return SimpleNamespace(
            body_pos=lambda _: position,
            body_mat=lambda _: rotation,
            collision_corners=lambda _: position + local @ rotation.T,
        )

    rim = {"inset": 0.005, "depth": 0.02}
    upright = rim_grasp(bowl(np.eye(3)), "bowl", 2.0, **rim)
    same = tilted_rim_grasp(bowl(np.eye(3)), "bowl", 2.0, **rim)
    assert same.point() == pytest.approx(upright.point(), abs=1e-12)
    assert same.rotation == pytest.approx(upright.rotation, abs=1e-12)
    askew = tilted_rim_grasp(bowl(tilt), "bowl", 2.0, **rim)
    assert askew.point() == pytest.approx(position + tilt @ (upright.point() - position))
    assert askew.rotation == pytest.approx(tilt @ upright.rotation)


def test_the_page_in_docs_is_what_its_counts_say() -> None:
    rows = measure_experts.read_rows(measure_experts.COUNTS)
    assert rows
    page = measure_experts.PAGE.read_text()
    for name, block in measure_experts.blocks(rows).items():
        assert f"<!-- begin {name} -->\n{block}\n<!-- end {name} -->" in page, name


@pytest.mark.parametrize(
    ("suite", "task_id"),
    [
        ("spatial", 0),
        ("object", 0),
        *(("goal", i) for i in (0, 5, 9)),
        *(("10", i) for i in (1, 2, 5, 9)),
    ],
)
def test_experts_solve_an_official_state(suite: str, task_id: int) -> None:
    assert success_rate("lite", suite, task_id, range(1)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), ALL_TASKS)
def test_experts_solve_four_of_five_official_states(suite: str, task_id: int) -> None:
    assert success_rate("lite", suite, task_id, range(50)) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), [key for key in ALL_TASKS if key[0] != "goal"])
def test_experts_find_back_from_noise_on_sampled_layouts(suite: str, task_id: int) -> None:
    starts = [Start(suite, task_id, seed=attempt) for attempt in range(10)]
    noisy = functools.partial(NoisyEpisodes, seed=1, noise=0.15)
    played = play(ExpertPolicy(), starts, num_envs=1, workers=0, env_wrappers=[noisy])
    assert sum(episode.success for episode in played) >= 7


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.parametrize(("suite", "task_id"), ALL_TASKS)
def test_experts_also_work_with_the_real_meshes(suite: str, task_id: int) -> None:
    assert success_rate("libero", suite, task_id, range(10)) >= (0.8 if suite == "goal" else 0.7)
