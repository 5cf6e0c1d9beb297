"""Compiled LIBERO tasks: models, goals and start layouts, cached on disk."""

from vla_gym.suites.libero.goals import Predicate, evaluate_goal
from vla_gym.suites.libero.model import TaskModel, load_task_model
from vla_gym.suites.libero.spec import Layout

__all__ = [
    "Layout",
    "Predicate",
    "TaskModel",
    "evaluate_goal",
    "load_task_model",
]
