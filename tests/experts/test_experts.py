"""Scripted experts: the phase machine on a toy arm, geometry and grasps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.experts import Expert, Phase, make_expert
from vla_gym.experts.geometry import GRIPPER_DOWN, world_box
from vla_gym.experts.grasps import rim_grasp, top_grasp
from vla_gym.experts.phase_machine import CLOSED, MAX_RETRIES, OPEN, hold
from vla_gym.suites import Task


class ToyArm:
    """A gripper that moves 30 % of each commanded translation, and one body shaped like a box."""

    def __init__(self, corners: np.ndarray | None = None) -> None:
        self.position = np.zeros(3)
        self.corners = corners if corners is not None else np.zeros((8, 3))
        self.task_model = SimpleNamespace(task=Task("goal", 99, "x", "x", 300, "goal"))

    def eef_pose(self) -> tuple[np.ndarray, np.ndarray]:
        return self.position.copy(), GRIPPER_DOWN.copy()

    def body_pos(self, name: str) -> np.ndarray:  # noqa: ARG002
        return np.zeros(3)

    def body_mat(self, name: str) -> np.ndarray:  # noqa: ARG002
        return np.eye(3)

    def site_pos(self, name: str) -> np.ndarray:  # noqa: ARG002
        return np.zeros(3)

    def joint_qpos(self, name: str) -> float:  # noqa: ARG002
        return 0.0

    def collision_corners(self, body: str) -> np.ndarray:  # noqa: ARG002
        return self.corners

    def success(self) -> bool:
        return False

    def step(self, action: np.ndarray) -> None:
        self.position += 0.3 * 0.05 * action[:3]


def at(x: float, y: float = 0.0, z: float = 0.0):
    return lambda: np.array([x, y, z])


def box_corners(half: tuple[float, float, float]) -> np.ndarray:
    signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, 8).T
    return signs * np.array(half)


def run(arm: ToyArm, expert: Expert, steps: int) -> list[str]:
    """Return the phase of every step."""
    names = []
    for _ in range(steps):
        action = expert.act()
        assert action.shape == (7,) and action.dtype == np.float64
        assert np.all(np.abs(action) <= 1.0)
        names.append(expert.phase)
        arm.step(action)
    return names


def test_phases_follow_each_other_and_the_last_one_is_held() -> None:
    arm = ToyArm()
    phases = [
        Phase("out", at(0.1), tolerance=0.01),
        hold("close", at(0.1), 4, CLOSED, GRIPPER_DOWN),
        Phase("back", at(0.0), gripper=CLOSED, tolerance=0.01, speed=0.5),
    ]
    expert = Expert(arm, phases)
    names = run(arm, expert, 60)
    assert names.count("close") == 4
    assert sorted(set(names), key=names.index) == ["out", "close", "back"]
    assert np.linalg.norm(arm.position) < 1e-3
    assert expert.act()[6] == CLOSED


def test_speed_limits_the_norm_of_the_translation() -> None:
    expert = Expert(ToyArm(), [Phase("far", at(1.0, 1.0, 1.0), speed=0.4)])
    action = expert.act()
    assert np.linalg.norm(action[:3]) == pytest.approx(0.4)
    assert action[6] == OPEN


def test_max_steps_ends_a_phase_that_never_arrives() -> None:
    arm = ToyArm()
    names = run(arm, Expert(arm, [Phase("far", at(9.0), max_steps=7), Phase("end", at(0.0))]), 9)
    assert names == ["far"] * 7 + ["end"] * 2


def test_failed_check_goes_back_until_the_retries_are_used_up() -> None:
    arm = ToyArm()
    entered = []
    first = Phase("first", at(0.0), max_steps=1, on_enter=lambda: entered.append(1))
    second = Phase("second", at(0.0), max_steps=1, check=lambda: False, retry_from="first")
    expert = Expert(arm, [first, second, Phase("end", at(0.0))])
    names = run(arm, expert, 20)
    assert expert.retries == MAX_RETRIES == names.count("first") - 1
    assert len(entered) == MAX_RETRIES + 1
    assert names[-1] == "end"


def test_failed_guard_goes_back_at_once() -> None:
    arm = ToyArm()
    held = iter([True, True, False])
    phases = [
        Phase("grasp", at(0.0), max_steps=1),
        Phase("carry", at(9.0), guard=lambda: next(held, True), retry_from="grasp"),
    ]
    names = run(arm, Expert(arm, phases), 6)
    assert names == ["grasp", "carry", "carry", "grasp", "carry", "carry"]


@pytest.mark.parametrize(
    "phases",
    [
        [],
        [Phase("a", at(0.0)), Phase("a", at(1.0))],
        [Phase("a", at(0.0), check=lambda: True)],
        [Phase("a", at(0.0), check=lambda: True, retry_from="b")],
    ],
    ids=["empty", "same name", "check without retry", "unknown retry"],
)
def test_impossible_phase_lists_are_refused(phases: list[Phase]) -> None:
    with pytest.raises(ConfigError):
        Expert(ToyArm(), phases)


def test_grasps_follow_from_the_collision_geometry() -> None:
    arm = ToyArm(box_corners((0.02, 0.05, 0.03)))
    assert world_box(arm, "b").size == pytest.approx([0.04, 0.10, 0.06])
    grasp = top_grasp(arm, "b", below_top=0.02)
    assert grasp.point() == pytest.approx([0.0, 0.0, 0.01])
    # Narrow along x: the fingers' axis (first column) lies along x.
    assert np.abs(grasp.rotation[:, 0]) == pytest.approx([1.0, 0.0, 0.0], abs=1e-12)

    arm = ToyArm(box_corners((0.05, 0.05, 0.03)))
    rim = rim_grasp(arm, "b", np.pi / 2, inset=0.005, depth=0.02)
    assert rim.point() == pytest.approx([0.0, 0.045, 0.01])
    assert rim.rotation == pytest.approx(GRIPPER_DOWN)
    assert rim.retracted(0.1) == pytest.approx([0.0, 0.045, 0.11])
    tilted = rim_grasp(arm, "b", np.pi / 2, inset=0.005, depth=0.02, tilt=0.3)
    # The hand leans outward: the approach direction points inward and down.
    assert tilted.rotation[:, 2] == pytest.approx([0.0, -np.sin(0.3), -np.cos(0.3)])


def test_task_without_expert_is_one_clear_error() -> None:
    with pytest.raises(UnknownTaskError, match="No expert for task 99"):
        make_expert(ToyArm())
