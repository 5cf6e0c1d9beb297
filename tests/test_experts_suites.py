"""Scripted experts of the suites spatial and object, and the tool that measures experts."""

from __future__ import annotations

import numpy as np
import pytest

from vla_gym.experts import EXPERT_TASKS, make_expert
from vla_gym.experts.recording import episode_rng, record_episode
from vla_gym.sim import LiberoSim
from vla_gym.suites import get_task
from vla_gym.task_model import load_task_model

ALL_TASKS = [(suite, i) for suite in ("spatial", "object") for i in range(10)]


def success_rate(assets: str, suite: str, task_id: int, init_state_ids: range) -> float:
    task_model = load_task_model(get_task(suite, task_id), assets)
    sim = LiberoSim(task_model)
    wins = 0
    for init_state_id in init_state_ids:
        sim.reset(task_model.official_layout(init_state_id))
        expert = make_expert(sim)
        wins += any(sim.step(expert.act()) for _ in range(task_model.task.max_control_steps))
    return wins / len(init_state_ids)


def test_every_task_of_both_suites_has_an_expert() -> None:
    assert EXPERT_TASKS["spatial"] == EXPERT_TASKS["object"] == tuple(range(10))


@pytest.mark.parametrize(("suite", "task_id"), [("spatial", 0), ("object", 0)])
def test_experts_solve_official_states(suite: str, task_id: int) -> None:
    assert success_rate("lite", suite, task_id, range(2)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), ALL_TASKS)
def test_experts_solve_four_of_five_official_states(suite: str, task_id: int) -> None:
    assert success_rate("lite", suite, task_id, range(20)) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), ALL_TASKS)
def test_experts_find_back_from_noise_on_sampled_layouts(suite: str, task_id: int) -> None:
    task_model = load_task_model(get_task(suite, task_id), "lite")
    sim = LiberoSim(task_model)
    wins = 0
    for attempt in range(10):
        rng = episode_rng(1, task_model, attempt)
        wins += record_episode(sim, lambda: np.zeros(0), rng, noise=0.15) is not None
    assert wins >= 7


@pytest.mark.slow
@pytest.mark.libero_assets
@pytest.mark.parametrize(("suite", "task_id"), ALL_TASKS)
def test_experts_also_work_with_the_real_meshes(suite: str, task_id: int) -> None:
    assert success_rate("libero", suite, task_id, range(10)) >= 0.7
