"""Names of suites, and from a name to the suite.

Packages add suites through the entry-point group ``vla_gym.suites``; in their pyproject.toml::

    [project.entry-points."vla_gym.suites"]
    my-suite = "my_package.suite:MY_SUITE"

where ``MY_SUITE`` is an instance of :class:`vla_gym.suites.Suite`. Names joined by
``+``, such as ``"goal+spatial"``, stand for suites that are played together, see
:class:`vla_gym.suites.combined.CombinedSuite`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.suites.combined import CombinedSuite
from vla_gym.suites.protocol import Suite, Task

#: LIBERO's suites.
SUITES = ("goal", "spatial", "object", "10", "90")
#: LIBERO-PRO's: four of them with other positions, looks, words or goals.
VARIANTS = tuple(
    f"{base}-{variant}"
    for base in ("goal", "spatial", "object", "10")
    for variant in ("swap", "object", "lan", "task")
)
ENTRY_POINTS = "vla_gym.suites"
#: Begins the names of suites of a user's own BDDL files, and what returns one of them.
OWN_PREFIX, OWN_SUITE = "bddl-", "vla_gym.suites.libero.own:stored_suite"

_loaded: dict[str, Suite] = {}


def suite_names() -> tuple[str, ...]:
    """Return the names of the package's own suites and of the installed entry points."""
    found = {point.name for point in entry_points(group=ENTRY_POINTS)}
    return (*SUITES, *VARIANTS, *sorted(found - {*SUITES, *VARIANTS}))


def get_suite(name: str | Sequence[str]) -> Suite:
    """Return a suite; its module is imported at the first call.

    Args:
        name: One of :func:`suite_names`, or LIBERO's own word for it, such as
            ``"libero_goal_swap"``. Several names, or names joined by ``+``, give a suite of all
            their tasks.

    Raises:
        UnknownTaskError: If there is no such suite.
        ConfigError: If its module cannot be imported, it is no ``Suite``, or suites cannot be
            combined.
    """
    names = [name] if isinstance(name, str) else name
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise UnknownTaskError(f"A suite is named by a text, or several texts; got {name!r:.80}.")
    name = "+".join(names)
    if name not in _loaded:
        if "+" in name:
            suite: Suite = CombinedSuite([get_suite(part) for part in name.split("+")])
        else:
            suite = _load(name)
        _loaded[name] = _loaded.setdefault(suite.name, suite)
    return _loaded[name]


def get_task(suite: str, task_id: int) -> Task:
    """Return the task with a 0-based index in a suite; see :func:`get_suite`.

    Raises:
        UnknownTaskError: If the suite does not exist or the id is out of range.
    """
    found = get_suite(suite)
    return found.tasks[task_number(found, task_id)]


def suite_tasks(suite: str) -> tuple[Task, ...]:
    """Return all tasks of a suite in the order of their ids.

    Raises:
        UnknownTaskError: If the suite does not exist.
    """
    return tuple(get_suite(suite).tasks)


def task_number(suite: Suite, task: int | str) -> int:
    """Return the index of a task in a suite.

    Args:
        suite: The suite.
        task: The index, or ``"<suite>/<task_id>"``: a combined suite has tasks of several.

    Raises:
        UnknownTaskError: If the suite has no such task.
    """
    expected = f"expected 0..{len(suite.tasks) - 1}"
    try:
        if isinstance(task, str):
            name, slash, number = task.rpartition("/")
            wanted = get_task(name, int(number)) if slash else None
            return list(suite.tasks).index(wanted)  # type: ignore[arg-type]
        index = operator.index(task)
    except (TypeError, ValueError):
        index = None
    if index is None or isinstance(task, bool):
        raise UnknownTaskError(
            f"task_id must be an integer, or a task of suite {suite.name!r} as '<suite>/<number>': "
            f"{expected}, got {task!r:.80}."
        )
    if not 0 <= index < len(suite.tasks):
        raise UnknownTaskError(
            f"task_id {task} is out of range for suite {suite.name!r}: {expected}."
        )
    return index


def _load(name: str) -> Suite:
    if name.startswith(OWN_PREFIX):
        return resolve_name(OWN_SUITE)(name)
    known = suite_names()
    name = name if name in known else name.removeprefix("libero_").replace("_", "-")
    if name not in known:
        raise UnknownTaskError(
            f"Unknown suite {name!r:.80}: expected one of {', '.join(known)}. A package adds its "
            f"own through an entry point {ENTRY_POINTS!r}."
        )
    if name in SUITES or name in VARIANTS:
        return resolve_name("vla_gym.suites.libero.suite:LiberoSuite")(name)
    paths = {point.value for point in entry_points(group=ENTRY_POINTS, name=name)}
    if len(paths) > 1:
        raise ConfigError(
            f"Several installed packages offer the suite {name!r}: {', '.join(sorted(paths))}. "
            "Uninstall all but one."
        )
    (path,) = paths
    try:
        suite: Any = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"Cannot import the suite {name!r} from {path!r}: {error}") from error
    if not isinstance(suite, Suite) or suite.name != name:
        raise ConfigError(
            f"{path!r} is not the suite {name!r}: expected an instance of "
            f"vla_gym.suites.Suite with that name, got {suite!r:.80}."
        )
    return suite
