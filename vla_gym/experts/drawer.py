"""Open a drawer of the cabinet by its handle; open the top one and put the bowl inside."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.geometry import (
    GRIPPER_DOWN,
    BodyPoint,
    local_corners,
    rotation_x,
    rotation_z,
)
from vla_gym.experts.grasps import rim_grasp
from vla_gym.experts.phase_machine import CLOSED, OPEN, Expert, Phase, hold
from vla_gym.experts.pick_and_place import BOWL, Placement, offset_target, pick_and_place_phases

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

CABINET = "wooden_cabinet_1"
# LIBERO calls the cabinet's drawer open below -0.14 m (range -0.16 .. 0.01); pull a little more.
OPEN_QPOS = -0.145
# How far behind the handle's front face the pads close: half the depth of LIBERO's bar.
HANDLE_HALF_DEPTH = 0.008
# The pull aims at a point this far ahead of the handle, until the drawer is open.
PULL_LEAD = 0.06

# The bowl lies beside and partly beneath the open drawer: the hand takes its outer rim and leans
# away from the drawer, by 0.5 rad, so that it does not touch it.
BOWL_ANGLE = np.deg2rad(95.0)
BOWL_RIM = {"inset": 0.0056, "depth": 0.016, "tilt": 0.5}
# The bowl partly lies under the open drawer: it is pulled out before it is lifted.
PULL_OUT, PULL_OUT_RISE = 0.065, 0.03
# Opened just so far that the bowl fits: a wider drawer would cover more of it.
BOWL_DRAWER_QPOS = -0.12


def drawer_outward(sim: LiberoSim, level: str) -> np.ndarray:
    """Return the direction (3,) in which a drawer opens: every cabinet of LIBERO's own -y axis."""
    return sim.body_mat(f"{CABINET}_cabinet_{level}") @ np.array([0.0, -1.0, 0.0])


def drawer_phases(sim: LiberoSim, level: str, open_qpos: float = OPEN_QPOS) -> list[Phase]:
    """Return the phases that open a drawer: reach, approach, close, pull, let go, back off.

    The gripper comes in horizontally, because only 1.6 cm are free behind the handle's bar and the
    handles sit above each other, so nothing fits in from above.

    Args:
        sim: Simulation.
        level: ``"top"``, ``"middle"`` or ``"bottom"``.
        open_qpos: Joint position at which to stop pulling, metres (open is negative).
    """
    body = f"{CABINET}_cabinet_{level}"
    handle = BodyPoint(sim, body, handle_center(local_corners(sim, body)))
    outward = drawer_outward(sim, level)
    yaw = np.arctan2(outward[1], outward[0]) - np.pi / 2.0
    rotation = rotation_z(yaw) @ rotation_x(-np.pi / 2.0) @ GRIPPER_DOWN

    def in_front(distance: float) -> np.ndarray:
        return handle() + outward * distance

    def is_open() -> bool:
        return sim.joint_qpos(f"{CABINET}_{level}_level") < open_qpos

    free = partial(Phase, rotation=rotation, gripper=OPEN)
    return [
        free(
            "reach handle",
            partial(in_front, 0.10),
            tolerance=0.02,
            rotation_tolerance=0.12,
            max_steps=100,
        ),
        free("approach handle", handle, tolerance=0.008, max_steps=50, speed=0.7),
        hold("close on handle", handle, 9, CLOSED, rotation),
        Phase(
            "pull",
            lambda: sim.eef_pose()[0] if is_open() else in_front(PULL_LEAD),
            rotation,
            CLOSED,
            tolerance=0.005,
            max_steps=90,
            speed=0.8,
            check=is_open,
            retry_from="reach handle",
        ),
        hold("let go", handle, 5, OPEN, rotation, speed=0.3),
        free("back off", partial(in_front, 0.08), tolerance=0.02, max_steps=25),
    ]


def handle_center(corners: np.ndarray) -> np.ndarray:
    """Return the middle (3,) of the handle bar: what sticks out furthest along local -y.

    Args:
        corners: (K, 3) collision corners of the drawer in its own frame.
    """
    front = corners[:, 1].min()
    bar = corners[corners[:, 1] < front + HANDLE_HALF_DEPTH]
    middle = (bar.min(axis=0) + bar.max(axis=0)) / 2.0
    return np.array([middle[0], front + HANDLE_HALF_DEPTH, middle[2]])


def open_middle_drawer(sim: LiberoSim) -> Expert:
    """Open the middle drawer."""
    return Expert(sim, drawer_phases(sim, "middle"))


def bowl_in_top_drawer(sim: LiberoSim) -> Expert:
    """Open the top drawer and put the bowl inside."""
    grasp = rim_grasp(sim, BOWL, BOWL_ANGLE, **BOWL_RIM)
    aside = Phase(
        "aside",
        lambda: grasp.retracted(0.22),
        grasp.rotation,
        OPEN,
        tolerance=0.05,
        max_steps=50,
        turn_speed=1.0,
    )
    target = offset_target(lambda: sim.site_pos(f"{CABINET}_top_region"), 0.0, 0.0, -0.01)
    outward = PULL_OUT * drawer_outward(sim, "top")
    placement = Placement(
        target, travel_height=1.26, pull_out=(outward[0], outward[1], PULL_OUT_RISE)
    )
    bowl = pick_and_place_phases(sim, BOWL, grasp, placement)
    return Expert(sim, [*drawer_phases(sim, "top", BOWL_DRAWER_QPOS), aside, *bowl])
