"""Which task has an expert, and how to build it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vla_gym.errors import UnknownTaskError
from vla_gym.experts import closing, drawer, groceries, long_tasks, pick_and_place, stove
from vla_gym.experts.phase_machine import Expert

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

ExpertBuilder = Callable[["LiberoSim"], Expert]

_BUILDERS: dict[str, dict[int, ExpertBuilder]] = {
    "goal": {
        0: drawer.open_middle_drawer,
        1: pick_and_place.bowl_on_stove,
        2: pick_and_place.bottle_on_cabinet,
        3: drawer.bowl_in_top_drawer,
        4: pick_and_place.bowl_on_cabinet,
        5: stove.plate_to_stove_front,
        6: pick_and_place.cream_cheese_in_bowl,
        7: stove.turn_on_stove,
        8: pick_and_place.bowl_on_plate,
        9: pick_and_place.bottle_on_rack,
    },
    # On the +y side of these three bowls the hand meets the drawer, the other bowl or the cabinet.
    # Best of six to nine angles each on 8 to 20 sampled layouts an angle, with and without noise.
    "spatial": dict.fromkeys(range(10), pick_and_place.bowl_on_plate_from(90.0))
    | dict.fromkeys((6, 9), pick_and_place.bowl_on_plate_from(180.0))
    | {4: pick_and_place.bowl_on_plate_from(180.0, pick_and_place.DRAWER_LIFT)},
    "object": dict.fromkeys(range(10), groceries.grocery_in_basket),
    "10": {
        **dict.fromkeys((0, 1, 7), long_tasks.groceries_in_basket),
        2: long_tasks.stove_and_pot,
        3: closing.bowl_in_bottom_drawer,
        4: long_tasks.mugs_on_plates,
        5: long_tasks.book_in_caddy,
        6: long_tasks.mug_and_pudding,
        8: long_tasks.pots_on_stove,
        9: closing.mug_in_microwave,
    },
}

EXPERT_TASKS: dict[str, tuple[int, ...]] = {
    suite: tuple(sorted(builders)) for suite, builders in _BUILDERS.items()
}
"""Suite name -> ids of the tasks that have an expert."""


def make_expert(sim: LiberoSim) -> Expert:
    """Build the expert of the simulation's task.

    Args:
        sim: Simulation that has been reset: the expert reads the scene's geometry now, so make a
            new expert after every reset.

    Raises:
        UnknownTaskError: If the task has no expert.
    """
    task = sim.task_model.task
    builder = _BUILDERS.get(task.suite, {}).get(task.task_id)
    if builder is None:
        known = ", ".join(f"{suite} {ids}" for suite, ids in EXPERT_TASKS.items())
        raise UnknownTaskError(
            f"No expert for task {task.task_id} of suite {task.suite!r}: experts exist for {known}."
        )
    return builder(sim)
