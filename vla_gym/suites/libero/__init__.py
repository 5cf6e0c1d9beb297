"""Compiled LIBERO tasks: models, goals and start layouts, cached on disk."""

from vla_gym.suites.libero.goals import Predicate, evaluate_goal, geometric_candidate
from vla_gym.suites.libero.model import SiteIndicator, TaskModel, load_task_model
from vla_gym.suites.libero.scene_file import SceneObject
from vla_gym.suites.libero.spec import Layout, RobotSpec

__all__ = [
    "Layout",
    "Predicate",
    "RobotSpec",
    "SceneObject",
    "SiteIndicator",
    "TaskModel",
    "evaluate_goal",
    "geometric_candidate",
    "load_task_model",
]
