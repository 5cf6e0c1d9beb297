"""Two things one after the other: tasks of the suite ``10`` with groceries, mugs, pots, a book."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.geometry import (
    GRIPPER_DOWN,
    BodyPoint,
    rotation_z,
    top_box,
    world_box,
    wrap_half_turn,
)
from vla_gym.experts.grasps import Grasp, rim_grasp, top_grasp
from vla_gym.experts.groceries import grocery_phases
from vla_gym.experts.phase_machine import OPEN, Expert, Phase, hold
from vla_gym.experts.pick_and_place import Placement, offset_target, pick_and_place_phases
from vla_gym.experts.stove import knob_phases

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

# Control steps in which a released thing comes to rest before its goal is looked at.
SETTLE = 14
# World height of the living room's table; all in metres.
TABLE = 0.435
# The first grocery goes so far to one side of the basket's middle in x and y, the second to the
# other: in a corner each, two cans have room beside each other.
BASKET_ASIDE = 0.021
# How far above a flat box's top the palm is, how wide that is, how wide a finger's pad.
PALM_HEIGHT, PALM_WIDTH, PAD_WIDTH = 0.08, 0.24, 0.018
# Of a mug's rim and of a pot's knob, from the highest point down.
RIM_HEIGHT, KNOB_HEIGHT = 0.003, 0.012
MUG_RIM = {"inset": 0.005, "depth": 0.022}
# The pot's knob is pinched so far below its top.
KNOB_GRASP = 0.002
# Two pots stand side by side on the burner, so far from its middle.
POT_ASIDE = 0.043
STOVE_SITE = "flat_stove_1_cook_region"


def goal_holds(sim: LiberoSim, index: int) -> Callable[[], bool]:
    """Return a test of one of the goal's conditions."""
    condition = sim.task_model.goal[index]
    return lambda: condition.holds(sim.data)


def part(sim: LiberoSim, name: str, phases: Sequence[Phase], goal: int) -> list[Phase]:
    """Return one part of a task: repeated until its condition of the goal holds.

    Args:
        sim: Simulation.
        name: Comes before the name of each phase: a second part has the same.
        phases: What is done.
        goal: Which condition of the goal it brings about.
    """
    named = [
        replace(p, name=f"{name}: {p.name}", retry_from=p.retry_from and f"{name}: {p.retry_from}")
        for p in phases
    ]
    last = replace(
        named[-1], check=goal_holds(sim, goal), retry_from=named[0].name, min_steps=SETTLE
    )
    return [*named[:-1], last]


def in_order(*parts: list[Phase]) -> list[Phase]:
    """Return the phases of all parts; the hand rests where the last one ends."""
    phases = [phase for each in parts for phase in each]
    return [*phases, replace(phases[-1], name="rest", check=None, retry_from=None, on_enter=None)]


def groceries_in_basket(sim: LiberoSim) -> Expert:
    """Put both groceries that the goal names into the basket, side by side."""
    parts = []
    for i, (_, name, region) in enumerate(sim.task_model.task.problem.goal):
        aside = (-BASKET_ASIDE, BASKET_ASIDE)[i]
        phases = grocery_phases(
            sim, name, region, ground=TABLE, grip=roomy_grip(sim, name), aside=(aside, aside)
        )
        parts.append(part(sim, name, phases, i))
    return Expert(sim, in_order(*parts))


def roomy_grip(sim: LiberoSim, name: str) -> float:
    """Return where to pinch an object, from its middle along world x: at the end of a flat box.

    What stands beside a flat box is taller than the fingers are long: over its middle the palm,
    which is wide along world y, may meet it. Cans and bottles are pinched in the middle.
    """
    objects = sim.task_model.objects
    box = world_box(sim, objects[name].body)
    if box.size[2] > PALM_HEIGHT / 2.0:
        return 0.0
    others = [world_box(sim, spec.body) for key, spec in objects.items() if key != name]
    tall = [
        other
        for other in others
        if other.high[2] > box.high[2] + PALM_HEIGHT
        and abs(other.center[1] - box.center[1]) < PALM_WIDTH / 2.0 + other.size[1] / 2.0
    ]
    shift = box.size[0] / 2.0 - PAD_WIDTH

    def room(grip: float) -> float:
        x = box.center[0] + grip
        return min((max(o.low[0] - x, x - o.high[0]) for o in tall), default=0.0)

    return max((0.0, shift, -shift), key=room)


def mug_grasp(sim: LiberoSim, body: str) -> Grasp:
    """Straddle a mug's wall across from its handle."""
    rim = top_box(sim, body, RIM_HEIGHT)
    away = rim.center - world_box(sim, body).center
    return rim_grasp(sim, body, np.arctan2(away[1], away[0]), rim, **MUG_RIM)


def mug_phases(sim: LiberoSim, mug: str, plate: str) -> list[Phase]:
    """Return the phases that put a mug onto a plate."""
    target = offset_target(lambda: sim.body_pos(f"{plate}_main"), 0.0, 0.0, 0.006)
    placement = Placement(target, travel_height=TABLE + 0.26, drop=0.004)
    return pick_and_place_phases(sim, f"{mug}_main", mug_grasp(sim, f"{mug}_main"), placement)


def mugs_on_plates(sim: LiberoSim) -> Expert:
    """Put each mug onto the plate that the goal names."""
    goal = sim.task_model.task.problem.goal
    parts = [part(sim, mug, mug_phases(sim, mug, p), i) for i, (_, mug, p) in enumerate(goal)]
    return Expert(sim, in_order(*parts))


def mug_and_pudding(sim: LiberoSim) -> Expert:
    """Put the mug onto the plate, then the pudding on the table beside it."""
    (_, mug, plate), (_, pudding, region) = sim.task_model.task.problem.goal
    body = f"{pudding}_main"
    # The region is on the table; 2 cm towards the outside there is room beside the plate.
    target = offset_target(lambda: sim.site_pos(region), 0.0, 0.02, 0.042)
    placement = Placement(target, travel_height=TABLE + 0.26)
    beside = pick_and_place_phases(sim, body, top_grasp(sim, body), placement)
    first = part(sim, mug, mug_phases(sim, mug, plate), 0)
    return Expert(sim, in_order(first, part(sim, pudding, beside, 1)))


def pot_phases(sim: LiberoSim, pot: str, aside: float) -> list[Phase]:
    """Return the phases that take a moka pot by the knob of its lid and put it on the burner.

    The knob is above the pot's middle: held there it hangs upright, held by its handle it turns.
    """
    body = f"{pot}_main"
    knob = top_box(sim, body, KNOB_HEIGHT)
    point = BodyPoint.at(sim, body, np.array([*knob.center[:2], knob.high[2] - KNOB_GRASP]))
    grasp = Grasp(point, GRIPPER_DOWN)
    height = float(sim.body_pos(body)[2] - world_box(sim, body).low[2])
    target = offset_target(lambda: sim.site_pos(STOVE_SITE), aside, 0.0, height + 0.006)
    placement = Placement(target, travel_height=float(point()[2]) + 0.12, tolerance=0.008)
    return pick_and_place_phases(sim, body, grasp, placement, close_steps=13)


def stove_and_pot(sim: LiberoSim) -> Expert:
    """Turn on the stove, then put the moka pot onto it."""
    knob = knob_phases(sim)
    turned = knob[-1]
    letting_go = hold("let go", turned.target, 5, OPEN, turned.rotation)
    rise = Phase("rise", lambda: turned.target() + [0.0, 0.0, 0.12], turned.rotation, max_steps=30)
    pot = part(sim, "pot", pot_phases(sim, "moka_pot_1", 0.0), 1)
    return Expert(sim, in_order(part(sim, "knob", [*knob, letting_go, rise], 0), pot))


def pots_on_stove(sim: LiberoSim) -> Expert:
    """Put both moka pots on the stove, which is on already, side by side."""
    parts = [
        part(sim, f"moka_pot_{i + 1}", pot_phases(sim, f"moka_pot_{i + 1}", aside), i)
        for i, aside in enumerate((-POT_ASIDE, POT_ASIDE))
    ]
    return Expert(sim, in_order(*parts))


def book_in_caddy(sim: LiberoSim) -> Expert:
    """Stand the book in the compartment that the goal names, its spine along the back."""
    _, book, region = sim.task_model.task.problem.goal[0]
    body, caddy = f"{book}_main", sim.body_mat("desk_caddy_1_main")
    grasp = top_grasp(sim, body, yaws=np.linspace(-np.pi / 2, np.pi / 2, 90).tolist())
    fingers = grasp.rotation[:, 0]
    turn = np.arctan2(caddy[1, 0], caddy[0, 0]) - np.arctan2(fingers[1], fingers[0])
    middle = world_box(sim, body).center - sim.body_pos(body)
    rotation = rotation_z(wrap_half_turn(turn))
    dx, dy, _ = rotation @ middle
    target = offset_target(lambda: sim.site_pos(region), -dx, -dy, -0.05)
    placement = Placement(
        target, travel_height=1.22, tolerance=0.006, rotation=rotation @ grasp.rotation
    )
    phases = pick_and_place_phases(sim, body, grasp, placement)
    return Expert(sim, in_order(part(sim, book, phases, 0)))
