"""Goal predicates: every rule at its boundary. Parity with upstream: test_suites_parity.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_gym.errors import CompileError
from vla_gym.outside import to_type
from vla_gym.suites.libero import evaluate_goal
from vla_gym.suites.libero.goals import Predicate, compile_goal
from vla_gym.suites.libero.scene_file import SceneObject, SceneSite

UP = np.eye(3).reshape(9)
OBJECTS: dict[str, dict[str, Any]] = {
    "bowl_1": {"body_id": 1, "joint_qpos": [0], "contact_geom_ids": [3, 4], "joint_rules": {}},
    "plate_1": {"body_id": 2, "joint_qpos": [7], "contact_geom_ids": [5], "joint_rules": {}},
    "cabinet_1": {
        "body_id": 3,
        "joint_qpos": [14, 15],
        "contact_geom_ids": [6],
        "joint_rules": {"open": ["<", -0.14], "close": [">", 0.0]},
    },
    "stove_1": {
        "body_id": 4,
        "joint_qpos": [16],
        "contact_geom_ids": [7],
        "joint_rules": {"turnon": [">=", 0.5], "turnoff": ["<", 0.0]},
    },
}
SITES = {
    "cabinet_1_top": {"id": 0, "size": [0.1, 0.2, 0.05], "parent": "cabinet_1", "joint_qpos": [14]},
    "table_zone": {"id": 1, "size": [0.04, 0.04, 0.007], "parent": None, "joint_qpos": []},
}


def goal(*words: str) -> tuple[Predicate, ...]:
    rest = {"is_fixture": False, "body": "", "joints": []}
    objects = {name: {**rest, **fields} for name, fields in OBJECTS.items()}
    return compile_goal(
        [words],
        to_type(objects, dict[str, SceneObject], "objects"),
        to_type(SITES, dict[str, SceneSite], "sites"),
    )


class View:
    """A world of four bodies and two sites, everything at the origin."""

    def __init__(self) -> None:
        self.xpos = np.zeros((5, 3))
        self.site_xpos = np.zeros((2, 3))
        self.site_xmat = np.stack([UP, UP])
        self.qpos = np.zeros(17)
        self.contacts: list[tuple[int, int]] = []

    @property
    def contact(self) -> Any:
        return SimpleNamespace(geom=np.array(self.contacts, dtype=np.int32).reshape(-1, 2))


def below(value: float) -> float:
    return math.nextafter(value, -math.inf)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        ((0.0, 0.0, 0.0), True),  # the same height is high enough
        ((0.0, 0.0, -1e-12), False),
        ((below(0.03), 0.0, 0.1), True),
        ((0.03, 0.0, 0.1), False),  # strictly nearer than 3 cm
        ((0.022, 0.022, 0.1), False),
    ],
)
def test_on_object(offset: tuple[float, float, float], expected: bool) -> None:
    view = View()
    view.xpos[1] = offset
    assert not evaluate_goal(goal("on", "bowl_1", "plate_1"), view)  # nothing touches
    assert goal("on", "bowl_1", "plate_1")[0].geometric(view) is expected
    view.contacts = [(3, 9), (5, 4)]
    assert evaluate_goal(goal("on", "bowl_1", "plate_1"), view) is expected


def test_contact_counts_in_either_order_and_between_the_two_only() -> None:
    on = goal("on", "bowl_1", "plate_1")
    view = View()
    for contacts, expected in [
        ([], False),
        ([(3, 4)], False),
        ([(3, 6)], False),
        ([(5, 9)], False),
        ([(3, 5)], True),
        ([(5, 3)], True),
        ([(0, 0), (6, 7), (4, 5)], True),
    ]:
        view.contacts = contacts
        assert evaluate_goal(on, view) is expected, contacts


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        ((0.0, 0.0, 0.05), True),
        ((0.0, 0.0, 0.05 - 0.005), False),
        ((0.0, 0.0, 0.0451), True),
        ((0.0, 0.0, below(0.05 + 0.10)), True),
        ((0.0, 0.0, 0.05 + 0.10), False),
        ((below(0.1), 0.0, 0.1), True),
        ((0.1, 0.0, 0.1), False),
        ((-0.1, 0.0, 0.1), False),
        ((0.0, below(0.2), 0.1), True),
        ((0.0, 0.2, 0.1), False),
    ],
)
def test_on_site(offset: tuple[float, float, float], expected: bool) -> None:
    view = View()
    view.xpos[1] = offset
    on = goal("on", "bowl_1", "cabinet_1_top")
    assert on[0].geometric(view) is expected
    assert not evaluate_goal(on, view)
    view.contacts = [(6, 4)]
    assert evaluate_goal(on, view) is expected


def test_on_site_uses_the_site_matrix_as_upstream_does() -> None:
    view = View()
    # A quarter turn about z: R maps (0, 0.15) to (-0.15, 0), outside 0.1; R^T would do the same
    # for both signs, so tilt about x as well, where R and R^T differ.
    view.site_xmat[0] = np.array([[0, -1, 0], [0, 0, -1], [1, 0, 0]], dtype=float).reshape(9)
    view.contacts = [(6, 4)]
    view.xpos[1] = [0.06, 0.0, 0.0]  # R d = (0, 0, 0.06)
    assert evaluate_goal(goal("on", "bowl_1", "cabinet_1_top"), view)
    view.xpos[1] = [0.0, 0.0, -0.06]  # R^T d = (-0.0, ...), R d = (0, 0.06, 0)
    assert not evaluate_goal(goal("on", "bowl_1", "cabinet_1_top"), view)


def test_on_a_region_of_the_table_needs_no_contact() -> None:
    view = View()
    view.xpos[2] = [0.0, 0.0, 0.01]
    on = goal("on", "plate_1", "table_zone")
    assert evaluate_goal(on, view)
    view.xpos[2] = [0.04, 0.0, 0.01]
    assert not evaluate_goal(on, view)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        ((0.0, 0.0, 0.0), True),
        ((below(0.1), 0.0, 0.0), True),
        ((0.1, 0.0, 0.0), False),
        ((0.0, 0.0, -0.0599), True),  # the lower bound is a centimetre lower
        ((0.0, 0.0, -0.05 - 0.01), False),
        ((0.0, 0.0, 0.05), False),
    ],
)
def test_in_site(offset: tuple[float, float, float], expected: bool) -> None:
    view = View()
    view.xpos[1] = offset
    inside = goal("in", "bowl_1", "cabinet_1_top")
    assert evaluate_goal(inside, view) is expected  # no contact is asked for
    assert inside[0].geometric(view) is expected


@pytest.mark.parametrize(
    ("words", "address", "value", "expected"),
    [
        (("open", "cabinet_1_top"), 14, -0.14, False),
        (("open", "cabinet_1_top"), 14, below(-0.14), True),
        (("open", "cabinet_1_top"), 15, -0.2, False),  # another drawer
        (("open", "cabinet_1"), 15, -0.2, True),  # any joint
        (("close", "cabinet_1"), 14, 0.1, False),  # all joints
        (("close", "cabinet_1_top"), 14, 0.0, False),
        (("close", "cabinet_1_top"), 14, 1e-9, True),
        (("turnon", "stove_1"), 16, 0.5, True),
        (("turnon", "stove_1"), 16, below(0.5), False),
        (("turnoff", "stove_1"), 16, -1e-9, True),
        (("turnoff", "stove_1"), 16, 0.0, False),
    ],
)
def test_joints(words: tuple[str, ...], address: int, value: float, expected: bool) -> None:
    view = View()
    view.qpos[address] = value
    assert evaluate_goal(goal(*words), view) is expected


def test_goals_are_conjunctions() -> None:
    both = goal("turnon", "stove_1") + goal("on", "bowl_1", "plate_1")
    view = View()
    view.contacts = [(3, 5)]
    assert not evaluate_goal(both, view)
    view.qpos[16] = 1.0
    assert evaluate_goal(both, view)


@pytest.mark.parametrize(
    "words",
    [
        ("on", "bowl_1", "nowhere"),
        ("in", "bowl_1", "plate_1"),
        ("near", "bowl_1", "plate_1"),
        ("open", "bowl_1"),
        ("turnon", "cabinet_1_top"),
        ("open", "cabinet_1", "stove_1"),
        ("on", "table_zone", "plate_1"),
    ],
)
def test_what_upstream_cannot_judge_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(CompileError, match=" ".join(words)):
        goal(*words)
