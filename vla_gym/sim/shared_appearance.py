"""What the simulations of one scene share of its variation; the model's lock is held."""

from __future__ import annotations

import numpy as np

from vla_gym.sim.model_io import SharedModel
from vla_gym.suites.libero.model import TaskModel
from vla_gym.variation.appearance import Appearance, ModelAppearance, make_appearance
from vla_gym.variation.clutter import ClutterPlaces, ClutterSurvey


def model_appearance(shared: SharedModel, task_model: TaskModel) -> ModelAppearance:
    """Return what the shared model looks like."""
    return shared.once("appearance", lambda: ModelAppearance(shared.model, task_model))


def clutter_places(shared: SharedModel, task_model: TaskModel) -> ClutterPlaces:
    """Return where clutter may stand in the task."""

    def find() -> ClutterPlaces:
        # Without anybody's variation; simulations write theirs before they need it.
        model_appearance(shared, task_model).show(None)
        return ClutterSurvey(shared.model, task_model).places()

    return shared.once(f"clutter places of {task_model.task.key}", find)


def appearance_of(shared: SharedModel, task_model: TaskModel, vector: np.ndarray) -> Appearance:
    """Return how a task looks with a variation; see :func:`make_appearance`."""
    plain = model_appearance(shared, task_model)
    sizes = clutter_places(shared, task_model).sizes if task_model.clutter else {}
    return make_appearance(plain, shared.model, task_model, vector, sizes)


def show(shared: SharedModel, task_model: TaskModel, appearance: Appearance | None) -> None:
    """Write an appearance into the model, if any simulation has varied it."""
    if "appearance" in shared.derived:
        model_appearance(shared, task_model).show(appearance)
