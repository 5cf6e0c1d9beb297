"""Put something inside and shut it: the bowl into the drawer, the mug into the microwave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

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
from vla_gym.experts.drawer import handle_center
from vla_gym.experts.long_tasks import in_order, part
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

DRAWER = "white_cabinet_1_cabinet_bottom"
DRAWER_SITE = "white_cabinet_1_bottom_region"
DOOR_POINT = np.array([0.18, -0.035, 0.06])
DOOR = "microwave_1_microdoorroot"
MICROWAVE_SITE = "microwave_1_heating_region"


def shut_phases(
    push: Callable[[float], np.ndarray], rotation: np.ndarray, way: list[Callable[[], np.ndarray]]
) -> list[Phase]:
    """Return the phases that push something shut with closed fingers.

    Args:
        push: Called with a distance for the point (3,) so far before the surface to push.
        rotation: (3, 3) orientation of the grip site.
        way: Points (3,) to pass on the way there.
    """
    closed = partial(Phase, rotation=rotation, gripper=CLOSED)
    passing = [
        closed(f"way {i}", point, tolerance=0.03, max_steps=70) for i, point in enumerate(way)
    ]
    return [
        *passing,
        closed(
            "before", lambda: push(0.06), tolerance=0.03, rotation_tolerance=0.15, max_steps=70
        ),
        closed("push", lambda: push(-0.06), tolerance=0.0, max_steps=80, speed=0.7),
        closed("back", lambda: push(0.08), tolerance=0.02, max_steps=20),
    ]


def bowl_in_bottom_drawer(sim: LiberoSim) -> Expert:
    """Put the bowl into the open bottom drawer, then push the drawer shut by its handle."""
    grasp = rim_grasp(sim, BOWL, np.pi, **BOWL_RIM)
    target = offset_target(lambda: sim.site_pos(DRAWER_SITE), 0.0, -0.028, -0.02)
    bowl = pick_and_place_phases(sim, BOWL, grasp, Placement(target, travel_height=1.26))
    handle = BodyPoint(sim, DRAWER, handle_center(local_corners(sim, DRAWER)))
    outward = sim.body_mat(DRAWER) @ np.array([0.0, -1.0, 0.0])
    # The hand leans back from the handles above this one; its fingers lie side by side.
    rotation = rotation_x(PUSH_TILT) @ rotation_z(np.pi / 2.0) @ GRIPPER_DOWN

    def push(distance: float) -> np.ndarray:
        return handle() + outward * (distance + 0.02)

    way = [lambda: push(0.10) + [0.0, 0.0, 0.25], lambda: push(0.10)]
    shut = shut_phases(push, rotation, way)
    return Expert(sim, in_order(part(sim, "bowl", bowl, 1), part(sim, "drawer", shut, 0)))


PUSH_TILT = 1.0
# A mug's handle, in the mug's frame, is pinched by a hand that leans by so much.
HANDLE_TILT = 0.9


def mug_in_microwave(sim: LiberoSim) -> Expert:
    """Put the mug into the microwave, held by its handle, then push the door shut."""
    body = "white_yellow_mug_1_main"
    box, rim = world_box(sim, body), top_box(sim, body, 0.003)
    point = np.array([rim.center[0], box.low[1] + 0.012, box.low[2] + 0.056])
    rotation = rotation_x(HANDLE_TILT) @ rotation_z(np.pi / 2.0) @ GRIPPER_DOWN
    grasp = Grasp(BodyPoint.at(sim, body, point), rotation)
    target = offset_target(lambda: sim.site_pos(MICROWAVE_SITE), -0.03, -0.05, -0.068)
    placement = Placement(target, travel_height=1.02, push_in=(0.0, -0.16, 0.02))
    mug = pick_and_place_phases(sim, body, grasp, placement)
    panel = BodyPoint(sim, DOOR, DOOR_POINT)

    def push(distance: float) -> np.ndarray:
        return panel() + sim.body_mat(DOOR) @ [0.0, -1.0, 0.0] * distance

    way = [
        lambda: sim.site_pos(MICROWAVE_SITE) + [-0.03, -0.3, 0.3],
        lambda: push(0.10) + [0.0, 0.0, 0.22],
        lambda: push(0.10),
    ]
    shut = shut_phases(push, GRIPPER_DOWN, way)
    return Expert(sim, in_order(part(sim, "mug", mug, 0), part(sim, "door", shut, 1)))
