"""Task suites: names of tasks, their instructions and step limits.

Reading this package imports neither a simulator nor a benchmark's own package.
"""

from __future__ import annotations

from vla_gym.errors import UnknownTaskError
from vla_gym.suites.libero.names import TASK_NAMES
from vla_gym.suites.libero.tasks import NUM_INIT_STATES, libero_tasks
from vla_gym.suites.libero.tasks import LiberoTask as Task

SUITES = tuple(TASK_NAMES)

__all__ = ["NUM_INIT_STATES", "SUITES", "Task", "get_task", "suite_tasks"]


def get_task(suite: str, task_id: int) -> Task:
    """Return one task.

    Args:
        suite: One of :data:`SUITES`; a ``libero_`` prefix is accepted.
        task_id: 0-based index in the suite.

    Raises:
        UnknownTaskError: If the suite does not exist or the id is out of range.
    """
    tasks = suite_tasks(suite)
    if isinstance(task_id, bool) or not hasattr(task_id, "__index__"):
        raise UnknownTaskError(f"task_id must be an integer, got {task_id!r}.")
    if not 0 <= task_id < len(tasks):
        raise UnknownTaskError(
            f"task_id {task_id} is out of range for suite {suite.removeprefix('libero_')!r}: "
            f"expected 0..{len(tasks) - 1}."
        )
    return tasks[task_id]


def suite_tasks(suite: str) -> tuple[Task, ...]:
    """Return all tasks of a suite in the order of their ids.

    Raises:
        UnknownTaskError: If the suite does not exist.
    """
    suite = suite.removeprefix("libero_")
    if suite not in TASK_NAMES:
        raise UnknownTaskError(f"Unknown suite {suite!r}: expected one of {', '.join(SUITES)}.")
    return libero_tasks(suite)
