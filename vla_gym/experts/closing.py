"""Put something inside and shut it: the bowl into the drawer, the mug into the microwave."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.drawer import handle_center
from vla_gym.experts.geometry import (
    GRIPPER_DOWN,
    BodyPoint,
    local_corners,
    rotation_x,
    rotation_z,
    top_box,
    world_box,
)
from vla_gym.experts.grasps import Grasp, rim_grasp
from vla_gym.experts.long_tasks import RIM_HEIGHT, goal_holds, in_order, part
from vla_gym.experts.phase_machine import CLOSED, Expert, Phase
from vla_gym.experts.pick_and_place import (
    BOWL,
    BOWL_RIM,
    Placement,
    offset_target,
    pick_and_place_phases,
)

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

DRAWER, DRAWER_SITE = "white_cabinet_1_cabinet_bottom", "white_cabinet_1_bottom_region"
DOOR, MICROWAVE_SITE = "microwave_1_microdoorroot", "microwave_1_heating_region"
MUG = "white_yellow_mug_1_main"
# Drawer and door are pushed along +y of their own frames; all in metres and radians.
OUTWARD = np.array([0.0, -1.0, 0.0])
# The bowl goes to the drawer's front: the handles of the drawers above reach over its middle.
BOWL_OFFSET = (0.0, -0.028, -0.02)
BOWL_RESTS_BELOW = 0.005
# The hand that pushes the drawer leans back from the handles above; leaning further its wrist
# meets the wine rack. Its fingers' middle is so far before what they touch.
PUSH_TILT, FINGER_DEPTH = 0.45, 0.02
# Where the mug's handle is pinched, from its outer end and from the table: at the upper bend, for
# along one bar alone it turns between the fingers. The hand leans back from the microwave.
HANDLE_INSET, HANDLE_HEIGHT, HANDLE_TILT = 0.014, 0.072, 1.0
# From the middle of the microwave's inside to the mug's place, and from there to where it waits
# before the opening. It is let go a centimetre above the floor, at whose edge it would tip.
MUG_OFFSET, BEFORE_OPENING = (-0.03, -0.05, -0.058), (0.0, -0.16, 0.012)
# Where the door is pushed, in its own frame: near its handle, well away from the hinge.
DOOR_POINT = np.array([0.18, -0.035, 0.06])


def push_phases(sim: LiberoSim, point: BodyPoint, rotation: np.ndarray) -> list[Phase]:
    """Push something shut with closed fingers: above it, down, reach, push, back off.

    Args:
        sim: Simulation.
        point: Where the grip site is when the fingers touch; it is followed.
        rotation: (3, 3) orientation of the grip site.
    """

    def before(distance: float, height: float = 0.0) -> np.ndarray:
        outward = sim.body_mat(point.body) @ OUTWARD
        return point() + outward * distance + np.array([0.0, 0.0, height])

    closed = partial(Phase, rotation=rotation, gripper=CLOSED)
    near = partial(before, 0.06)
    return [
        closed("above", partial(before, 0.10, 0.24), tolerance=0.03, max_steps=70),
        closed("down", partial(before, 0.10), tolerance=0.03, max_steps=70),
        closed("reach", near, tolerance=0.03, rotation_tolerance=0.15, max_steps=70),
        # The target moves with what is pushed, so it is never reached.
        closed("push", partial(before, -0.06), tolerance=0.0, max_steps=80, speed=0.7),
        closed("back off", partial(before, 0.08), tolerance=0.02, max_steps=20),
    ]


def bowl_in_bottom_drawer(sim: LiberoSim) -> Expert:
    """Put the bowl into the open bottom drawer, then push the drawer shut by its handle."""
    site = partial(sim.site_pos, DRAWER_SITE)

    def rests() -> bool:  # in the drawer, not on its front nor on a handle above it
        return bool(sim.body_pos(BOWL)[2] < site()[2] + BOWL_RESTS_BELOW)

    placement = Placement(offset_target(site, *BOWL_OFFSET), travel_height=1.26, until=rests)
    bowl = pick_and_place_phases(sim, BOWL, rim_grasp(sim, BOWL, np.pi, **BOWL_RIM), placement)
    touched = handle_center(local_corners(sim, DRAWER)) + OUTWARD * FINGER_DEPTH
    rotation = rotation_x(PUSH_TILT) @ rotation_z(-np.pi / 2.0) @ GRIPPER_DOWN
    shut = push_phases(sim, BodyPoint(sim, DRAWER, touched), rotation)
    return Expert(sim, in_order(part(sim, "bowl", bowl, 1), part(sim, "drawer", shut, 0)))


def mug_in_microwave(sim: LiberoSim) -> Expert:
    """Put the mug into the microwave, held by its handle, then push the door shut."""
    box, rim = world_box(sim, MUG), top_box(sim, MUG, RIM_HEIGHT)
    x, y, z = rim.center[0], box.low[1] + HANDLE_INSET, box.low[2] + HANDLE_HEIGHT
    rotation = rotation_x(HANDLE_TILT) @ rotation_z(np.pi / 2.0) @ GRIPPER_DOWN
    grasp = Grasp(BodyPoint.at(sim, MUG, np.array([x, y, z])), rotation)
    site = partial(sim.site_pos, MICROWAVE_SITE)
    placement = Placement(
        offset_target(site, *MUG_OFFSET),
        travel_height=1.04,
        push_in=BEFORE_OPENING,
        until=goal_holds(sim, 0),
    )
    mug = pick_and_place_phases(sim, MUG, grasp, placement)
    # Over the open door, not through it.
    rise = Phase("rise", offset_target(site, -0.03, -0.3, 0.3), gripper=CLOSED, tolerance=0.03)
    shut = [rise, *push_phases(sim, BodyPoint(sim, DOOR, DOOR_POINT), GRIPPER_DOWN)]
    return Expert(sim, in_order(part(sim, "mug", mug, 0), part(sim, "door", shut, 1)))
