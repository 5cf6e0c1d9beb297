"""Task suites: what tasks there are, and how they are compiled, begun and judged.

Importing this package imports neither a simulator nor a benchmark's own package.
"""

from vla_gym.suites.libero.own import BddlPath, choose_suite
from vla_gym.suites.protocol import ActionSpec, CompiledTask, ProprioSpec, Suite, Task
from vla_gym.suites.registry import (
    SUITES,
    VARIANTS,
    get_suite,
    get_task,
    suite_names,
    suite_tasks,
    task_number,
)

__all__ = [
    "SUITES",
    "VARIANTS",
    "ActionSpec",
    "BddlPath",
    "CompiledTask",
    "ProprioSpec",
    "Suite",
    "Task",
    "choose_suite",
    "get_suite",
    "get_task",
    "suite_names",
    "suite_tasks",
    "task_number",
]
