"""Goal predicates with LIBERO's exact rules, evaluated from plain arrays.

A BDDL goal such as ``(And (On akita_black_bowl_1 plate_1))`` becomes a tuple of
:class:`Predicate`: numbers and ids only, resolved once when the task is loaded. Evaluation needs
neither mujoco nor libero. The rules (upstream files ``object_states/base_object_states.py``,
``objects/site_object.py`` and ``objects/articulated_objects.py``), with ``p`` the position of the
root body of the object named first:

========= ==================== ====================================================================
BDDL      second argument      true when
========= ==================== ====================================================================
On        object               ``target.z <= p.z``, in contact, and ``|target.xy - p.xy| < 0.03``
On        site of an object    ``d = R_site (p - site)``: ``|d.xy| < size.xy`` and
                               ``size.z - 0.005 < d.z < size.z + 0.1``, and in contact with the
                               object that owns the site
On        region of the table  as before, without contact
In        site                 ``site - |R_site size| < p < site + |R_site size|`` in each axis, the
                               lower z bound 0.01 lower; no contact asked
Open, ..  object or site       a threshold on the joints
========= ==================== ====================================================================
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_gym.errors import CompileError
from vla_gym.suites.libero.scene_file import SceneObject, SceneSite

Objects = Mapping[str, SceneObject]
Sites = Mapping[str, SceneSite]

ON_OBJECT = "on_object"
ON_SITE = "on_site"
IN_SITE = "in_site"
JOINT = "joint"

# Distances in metres, fixed in upstream's code.
ON_OBJECT_RADIUS = 0.03
ON_SITE_BELOW = 0.005
ON_SITE_HEIGHT = 0.10
IN_SITE_BELOW = 0.01

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Upstream calls an object open or turned on when ANY of its joints is, and closed or turned off
# when ALL are.
_ANY_JOINT = {"open": True, "close": False, "turnon": True, "turnoff": False}


@dataclass(frozen=True, eq=False)
class Predicate:
    """One condition of a goal; unused fields keep their defaults.

    Attributes:
        kind: ``on_object``, ``on_site``, ``in_site`` or ``joint``.
        text: The BDDL form, e.g. ``"on akita_black_bowl_1 plate_1"``.
        body: Body id of the object that must be somewhere.
        target_body: Body id of the object it must be on (``on_object``).
        site: Site id (``on_site``, ``in_site``).
        size: (3,) half sizes of the site in metres.
        geoms: Geom ids of the object.
        target_geoms: Geom ids of what it must touch; None: no contact is asked.
        joint_qpos: (K,) qpos addresses (``joint``).
        comparison, threshold: Test of each of these joints, e.g. ``<`` and -0.14 for an open
            drawer; metres or radians.
        any_joint: True if one joint is enough, False if all are needed.
    """

    kind: str
    text: str
    body: int = -1
    target_body: int = -1
    site: int = -1
    size: np.ndarray = field(default_factory=lambda: np.zeros(3))
    geoms: frozenset[int] = frozenset()
    target_geoms: frozenset[int] | None = None
    joint_qpos: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    comparison: str = "<"
    threshold: float = 0.0
    any_joint: bool = True

    def geometric(self, data: Any) -> bool:
        """Return whether everything but the contact holds."""
        if self.kind == JOINT:
            compare = COMPARISONS[self.comparison]
            results = (compare(data.qpos[a], self.threshold) for a in self.joint_qpos)
            return any(results) if self.any_joint else all(results)
        position = data.xpos[self.body]
        if self.kind == ON_OBJECT:
            target = data.xpos[self.target_body]
            near = np.linalg.norm(target[:2] - position[:2]) < ON_OBJECT_RADIUS
            return bool(target[2] <= position[2] and near)
        site, matrix = data.site_xpos[self.site], data.site_xmat[self.site].reshape(3, 3)
        if self.kind == ON_SITE:
            # Upstream multiplies by R, not by its transpose: for a site that is turned by anything
            # but half turns this is not the site's frame. Kept, since results must agree.
            x, y, z = matrix @ (position - site)
            size_x, size_y, size_z = self.size
            above = size_z - ON_SITE_BELOW < z < size_z + ON_SITE_HEIGHT
            return bool(above and abs(x) < size_x and abs(y) < size_y)
        reach = np.abs(matrix @ self.size)
        lower, upper = site - reach, site + reach
        lower[2] -= IN_SITE_BELOW
        return bool(np.all(position > lower) and np.all(position < upper))

    def contact(self, data: Any) -> bool:
        """Return whether the contact condition holds (True if none is asked)."""
        mine, theirs = self.geoms, self.target_geoms
        return theirs is None or any(
            (a in mine and b in theirs) or (b in mine and a in theirs)
            for a, b in data.contact.geom.tolist()
        )

    def holds(self, data: Any) -> bool:
        """Return whether the condition holds."""
        return self.geometric(data) and self.contact(data)


def evaluate_goal(goal: Sequence[Predicate], data: Any) -> bool:
    """Return whether all predicates of a goal hold.

    Args:
        goal: The predicates; LIBERO's goals are conjunctions.
        data: The ``MjData`` after kinematics and collision detection of the state to judge.
    """
    return all(p.holds(data) for p in goal)


def goal_progress(goal: Sequence[Predicate], data: Any) -> float:
    """Return the share of a goal's predicates that hold, 1 where :func:`evaluate_goal` is true."""
    return sum(p.holds(data) for p in goal) / len(goal)


def compile_goal(
    goal_state: Sequence[Sequence[str]], objects: Objects, sites: Sites
) -> tuple[Predicate, ...]:
    """Resolve a parsed BDDL goal against the tables of a compiled scene.

    Args:
        goal_state: Predicates such as ``["on", "akita_black_bowl_1", "plate_1"]``.
        objects: Of the scene, by instance name.
        sites: Of the scene, by region name.

    Raises:
        CompileError: If a predicate or a name is unknown, or upstream has no rule for it.
    """
    return tuple(_compile_predicate(state, objects, sites) for state in goal_state)


def _compile_predicate(state: Sequence[str], objects: Objects, sites: Sites) -> Predicate:
    name, arguments, text = state[0].lower(), state[1:], " ".join(state)
    for argument in arguments:
        if argument not in objects and argument not in sites:
            raise CompileError(f"Goal '{text}' names {argument!r}, which the scene does not have.")
    if name in _ANY_JOINT and len(arguments) == 1:
        return _joint_predicate(name, arguments[0], text, objects, sites)
    if name in ("on", "in") and len(arguments) == 2 and arguments[0] in objects:
        return _place_predicate(name, objects[arguments[0]], arguments[1], text, objects, sites)
    raise CompileError(
        f"Goal '{text}' is not supported: expected On or In with an object and a target, "
        f"or one of {', '.join(_ANY_JOINT)} with one argument."
    )


def _joint_predicate(
    name: str, argument: str, text: str, objects: Objects, sites: Sites
) -> Predicate:
    # An object answers for all its joints; a region (a drawer) for those of its own body, with
    # the rule of the object that owns it. Upstream's regions know open and close only.
    table = objects.get(argument) or sites[argument]
    owner = table if isinstance(table, SceneObject) else objects.get(table.parent or "")
    rule = owner.joint_rules.get(name) if owner else None
    if rule is None or (argument in sites and name not in ("open", "close")):
        raise CompileError(f"Goal '{text}': upstream has no rule for {name!r} of {argument!r}.")
    return Predicate(
        kind=JOINT,
        text=text,
        joint_qpos=np.asarray(table.joint_qpos, dtype=np.int64),
        comparison=rule[0],
        threshold=rule[1],
        any_joint=_ANY_JOINT[name],
    )


def _place_predicate(
    name: str, moved: SceneObject, target: str, text: str, objects: Objects, sites: Sites
) -> Predicate:
    geoms = frozenset(moved.contact_geom_ids)
    # Upstream looks a name up among objects and fixtures first, then among sites.
    if target in objects:
        if name == "in":
            raise CompileError(f"Goal '{text}': upstream has no rule for In with an object.")
        return Predicate(
            kind=ON_OBJECT,
            text=text,
            body=moved.body_id,
            target_body=objects[target].body_id,
            geoms=geoms,
            target_geoms=frozenset(objects[target].contact_geom_ids),
        )
    site = sites[target]
    owner = objects.get(site.parent) if name == "on" and site.parent else None
    return Predicate(
        kind=ON_SITE if name == "on" else IN_SITE,
        text=text,
        body=moved.body_id,
        site=site.id,
        size=np.asarray(site.size, dtype=np.float64),
        geoms=geoms,
        target_geoms=frozenset(owner.contact_geom_ids) if owner else None,
    )
