"""LIBERO's task suites: names, instructions, BDDL files and step limits.

Reading this module imports neither libero nor robosuite: the files that the ``libero`` package
installs are found by path alone.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vla_gym.errors import UnknownTaskError
from vla_gym.suites.bddl import Problem, read_problem
from vla_gym.suites.suite_names import TASK_NAMES

# Step limits in control steps (20 Hz), as the field evaluates: a little above the longest
# demonstration of each suite.
MAX_CONTROL_STEPS = {"goal": 300, "spatial": 220, "object": 280, "10": 520, "90": 400}

SUITES = tuple(TASK_NAMES)
NUM_INIT_STATES = 50

__all__ = [
    "MAX_CONTROL_STEPS",
    "NUM_INIT_STATES",
    "SUITES",
    "TASK_NAMES",
    "Task",
    "get_task",
    "libero_data_root",
    "suite_tasks",
]


_SCENE_PREFIX = re.compile(r"([A-Z_]+_SCENE\d+)_")


@dataclass(frozen=True)
class Task:
    """One LIBERO task.

    Attributes:
        suite: Suite name without the ``libero_`` prefix, e.g. ``"goal"``.
        task_id: Index in the suite, in the order of LIBERO's benchmark.
        name: File stem of the BDDL file.
        instruction: What the policy is told (LIBERO derives it from the file name).
        max_control_steps: Step limit in control steps of 50 ms.
    """

    suite: str
    task_id: int
    name: str
    instruction: str
    max_control_steps: int

    @property
    def bddl_file(self) -> Path:
        """Path of the task's BDDL file inside the installed libero package."""
        return libero_data_root() / "bddl_files" / f"libero_{self.suite}" / f"{self.name}.bddl"

    @property
    def problem(self) -> Problem:
        """What the task's BDDL file says; read once a process.

        Raises:
            UnknownTaskError: If the file is missing or damaged.
        """
        return read_problem(self.bddl_file)

    @property
    def objects(self) -> tuple[str, ...]:
        """Instance names of the movable objects, e.g. ``"akita_black_bowl_1"``."""
        return tuple(name for name, _ in self.problem.objects)

    @property
    def goal(self) -> str:
        """The goal in BDDL's words, e.g. ``"on akita_black_bowl_1 plate_1"``; "and" joins more."""
        return " and ".join(" ".join(predicate) for predicate in self.problem.goal)

    @property
    def key(self) -> str:
        """Short unique name, e.g. ``"goal_8"``."""
        return f"{self.suite}_{self.task_id}"

    @property
    def scene_name(self) -> str:
        """Name of the scene that the task plays in.

        Tasks of one scene differ in goal, words and initial placement only, so they share a
        compiled model. LIBERO-100 names its scenes; libero_10 and libero_90 have some in common.
        """
        if scene := _SCENE_PREFIX.match(self.name):
            return scene[1].lower()
        # Each task of libero_object has other objects; goal and spatial are one scene each.
        return f"object_{self.task_id}" if self.suite == "object" else self.suite

    @property
    def init_states_file(self) -> Path:
        """Path of the pickled official initial states; read only by the compile process."""
        return (
            libero_data_root() / "init_files" / f"libero_{self.suite}" / f"{self.name}.pruned_init"
        )


@cache
def libero_data_root() -> Path:
    """Return the folder that holds LIBERO's BDDL and init files, without importing libero.

    Raises:
        UnknownTaskError: If no libero package is installed.
    """
    spec = importlib.util.find_spec("libero")
    for location in spec.submodule_search_locations or () if spec else ():
        root = Path(location) / "libero"
        if (root / "bddl_files").is_dir():
            return root
    raise UnknownTaskError(
        "LIBERO's task files were not found: expected an installed package that provides "
        "'libero/libero/bddl_files'. Install it with: pip install rlinf-libero==0.1.3"
    )


def get_task(suite: str, task_id: int) -> Task:
    """Return one task.

    Args:
        suite: One of :data:`SUITES`; a ``libero_`` prefix is accepted.
        task_id: 0-based index in the suite.

    Raises:
        UnknownTaskError: If the suite does not exist or the id is out of range.
    """
    suite = suite.removeprefix("libero_")
    if suite not in TASK_NAMES:
        raise UnknownTaskError(f"Unknown suite {suite!r}: expected one of {', '.join(SUITES)}.")
    names = TASK_NAMES[suite]
    if isinstance(task_id, bool) or not hasattr(task_id, "__index__"):
        raise UnknownTaskError(f"task_id must be an integer, got {task_id!r}.")
    task_id = int(task_id)
    if not 0 <= task_id < len(names):
        raise UnknownTaskError(
            f"task_id {task_id} is out of range for suite {suite!r}: expected 0..{len(names) - 1}."
        )
    name = names[task_id]
    # As upstream derives it: libero_10 and libero_90 name the scene first.
    instruction = _SCENE_PREFIX.sub("", name).replace("_", " ")
    return Task(suite, task_id, name, instruction, MAX_CONTROL_STEPS[suite])


def suite_tasks(suite: str) -> tuple[Task, ...]:
    """Return all tasks of a suite in the order of their ids."""
    suite = suite.removeprefix("libero_")
    if suite not in TASK_NAMES:
        raise UnknownTaskError(f"Unknown suite {suite!r}: expected one of {', '.join(SUITES)}.")
    return tuple(get_task(suite, i) for i in range(len(TASK_NAMES[suite])))
