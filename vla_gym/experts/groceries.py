"""Put one of the groceries on the floor into the basket: every task of the suite ``object``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_gym.experts.geometry import world_box
from vla_gym.experts.grasps import Grasp, top_grasp
from vla_gym.experts.phase_machine import Expert, Phase
from vla_gym.experts.pick_and_place import (
    Placement,
    offset_target,
    pick_and_place_phases,
    repeated_until_success,
)

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

# All in metres. The floor is at 0; the hand must pass over the basket's wall and handle with the
# object below it.
TRAVEL_HEIGHT = 0.32
# The object's lowest point is let go this far above the middle of the basket's inside; a tall
# object is not held higher than this for its height's sake, or the hand hits the handle.
DROP_HEIGHT, MAX_BODY_HEIGHT = 0.02, 0.05
HOVER = 0.12


def grocery_phases(
    sim: LiberoSim,
    name: str,
    region: str,
    *,
    ground: float = 0.0,
    grip: float = 0.0,
    aside: tuple[float, float] = (0.0, 0.0),
) -> list[Phase]:
    """Return the phases that pick an object and let it go inside the basket.

    Args:
        sim: Simulation.
        name: Object, as the goal names it.
        region: Site inside the basket.
        ground: World height of what the basket stands on, metres.
        grip: World x from the object's middle where it is pinched, metres.
        aside: World x and y from the basket's middle where it is let go, metres.
    """
    body = f"{name}_main"
    middle = top_grasp(sim, body)
    grasp = Grasp(offset_target(middle.point, grip, 0.0, 0.0), middle.rotation)
    body_height = sim.body_pos(body)[2] - world_box(sim, body).low[2]
    height = DROP_HEIGHT + min(float(body_height), MAX_BODY_HEIGHT)
    target = offset_target(lambda: sim.site_pos(region), *aside, height)
    placement = Placement(target, travel_height=ground + TRAVEL_HEIGHT, tolerance=0.02)
    return pick_and_place_phases(sim, body, grasp, placement, hover=HOVER, close_steps=10)


def grocery_in_basket(sim: LiberoSim) -> Expert:
    """Pick the object that the task's goal names and let it go inside the basket."""
    _, name, region = sim.task_model.task.problem.goal[0]
    return Expert(sim, repeated_until_success(sim, grocery_phases(sim, name, region)))
