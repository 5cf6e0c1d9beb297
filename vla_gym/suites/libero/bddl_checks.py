"""Checks a BDDL file before LIBERO's code sees it: names, predicates, regions, numbers."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from vla_gym.suites.libero.bddl import Problem
from vla_gym.suites.libero.tasks import libero_data_root

#: Problem class -> the instance and the category of its workspace.
WORKSPACES = {
    "libero_tabletop_manipulation": ("main_table", "table"),
    "libero_kitchen_tabletop_manipulation": ("kitchen_table", "kitchen_table"),
    "libero_living_room_tabletop_manipulation": ("living_room_table", "living_room_table"),
    "libero_study_tabletop_manipulation": ("study_table", "study_table"),
    "libero_coffee_table_manipulation": ("coffee_table", "coffee_table"),
    "libero_floor_manipulation": ("floor", "floor"),
}
#: Predicate -> number of arguments; of goals and of starts.
PREDICATES = {"on": 2, "in": 2, "open": 1, "close": 1, "turnon": 1, "turnoff": 1}


@cache
def known_objects() -> tuple[str, ...]:
    """Return the categories of LIBERO's objects and fixtures, from its sources, by name."""
    found: list[str] = []
    for path in (libero_data_root() / "envs" / "objects").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        found += re.findall(r"^@register_object\s+(?:@\w+\s+)*class (\w+)", text, re.MULTILINE)
    # As upstream derives them: "FlatStove" -> "flat_stove".
    return tuple(sorted({re.sub(r"(?<!^)([A-Z0-9])", r"_\1", name).lower() for name in found}))


def check_problem(problem: Problem) -> None:
    """Check that LIBERO can build the scene of a file, as far as the file alone tells.

    Raises:
        ValueError: If not; in words that follow the file's name.
    """
    if problem.kind not in WORKSPACES:
        raise ValueError(_unknown("problem class", problem.kind, WORKSPACES))
    if not problem.language:
        raise ValueError("it has no (:language ...), the words that the robot is told.")
    if problem.scene[-1]:
        raise ValueError("(:scene_properties ...) is not supported: leave it out.")
    workspace = WORKSPACES[problem.kind][0]
    things = _things(problem)
    regions = {}
    for name, *fields in problem.regions:
        if any(len(field) != 2 for field in fields):
            raise ValueError(f"region {name}: expected one value, or one list, in each field.")
        target, full = _region(name, dict(fields), workspace)
        if full in regions:
            raise ValueError(f"region {name} of {target} is there twice.")
        regions[full] = target
    if not problem.goal:
        raise ValueError("it has no goal: (:goal (And ...)) is empty.")
    for predicate in problem.init + problem.goal:
        _check_predicate(predicate, things, regions, workspace)
    for name in problem.of_interest:
        if name not in (known := (*things, *regions)):
            raise ValueError(f"(:obj_of_interest ...): {_unknown('name', name, known)}")
    _check_places(problem)


def _check_places(problem: Problem) -> None:
    """Check that all objects have a place, also those on others, which come in the file's order."""
    placed = {args[0] for predicate, *args in problem.init if predicate in ("on", "in")}
    for name, _ in problem.objects:
        if name not in placed:
            raise ValueError(f"{name} has no place: (:init ...) needs (On {name} ...) or (In ...).")
    objects = dict(problem.objects)
    stacked = [tuple(args) for kind, *args in problem.init if kind == "on" and args[1] in objects]
    for k, (name, below) in enumerate(stacked):
        if below in {later for later, _ in stacked[k:]}:
            raise ValueError(f"(On {name} {below}): {below} needs its place before {name}.")


def _things(problem: Problem) -> dict[str, str]:
    """Return the category of all objects and fixtures but the workspace, by name."""
    workspace, category = WORKSPACES[problem.kind]
    things = dict(problem.objects + problem.fixtures)
    if len(things) < len(problem.objects) + len(problem.fixtures):
        raise ValueError("two objects or fixtures have the same name.")
    if things.pop(workspace, None) != category:
        raise ValueError(f"(:fixtures ...) lacks {workspace} - {category}, where things stand.")
    for name, kind in things.items():
        if kind not in known_objects():
            raise ValueError(f"{name}: {_unknown('object', kind, known_objects())}")
    return things


def _region(name: str, fields: dict[str, Any], workspace: str) -> tuple[str, str]:
    """Return what a region belongs to, and what predicates call it."""
    target = fields.get(":target")
    if not isinstance(target, str):
        raise ValueError(f"region {name} has no (:target ...).")
    ranges = fields.get(":ranges", ())
    rows = [("ranges", row, 4) for row in ranges]
    rows += [("yaw_rotation", row, 2) for row in fields.get(":yaw_rotation", ())]
    rows += [("rgba", fields[":rgba"], 4)] if ":rgba" in fields else []
    for field, row, count in rows:
        # LIBERO's reader would evaluate yaw_rotation as Python.
        if isinstance(row, str) or len(row) != count or not all(map(_is_number, row)):
            raise ValueError(
                f"(:{field} ...) of region {name}: expected rows of {count} numbers, got {row}."
            )
    if unknown := fields.keys() - {":target", ":ranges", ":yaw_rotation", ":rgba"}:
        raise ValueError(f"region {name} has unknown fields {', '.join(sorted(unknown))}.")
    if target == workspace:
        if not ranges:
            raise ValueError(f"region {name} of {workspace} has no (:ranges ...).")
        for x0, y0, x1, y1 in (map(float, row) for row in ranges):
            if x0 > x1 or y0 > y1:
                raise ValueError(
                    f"(:ranges ...) of region {name}: expected x0 y0 x1 y1, ascending."
                )
    return target, f"{target}_{name}"


def _check_predicate(
    predicate: tuple[Any, ...], things: dict[str, str], regions: dict[str, str], workspace: str
) -> None:
    name, *arguments = predicate
    if name not in PREDICATES:
        raise ValueError(_unknown("predicate", name, PREDICATES))
    text = " ".join(map(str, predicate))
    if len(arguments) != PREDICATES[name]:
        raise ValueError(f"({text}): {name} takes {PREDICATES[name]} names.")
    usable = {r for r, target in regions.items() if target in things or target == workspace}
    for argument in arguments:
        if argument not in things and argument not in usable:
            raise ValueError(f"({text}): {_unknown('name', argument, (*things, *sorted(usable)))}")
    if len(arguments) == 2 and arguments[0] not in things:
        raise ValueError(f"({text}): expected an object first, got the region {arguments[0]}.")
    if name == "in" and arguments[1] not in usable:
        raise ValueError(f"({text}): expected a region second, got {arguments[1]}.")


def _is_number(word: Any) -> bool:
    try:
        return math.isfinite(float(word))
    except (TypeError, ValueError):
        return False


def _unknown(what: str, word: Any, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {word!r}.{hint} Known: {', '.join(names)}."
