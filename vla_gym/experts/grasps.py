"""Where and how to take hold of an object, read from its collision geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.geometry import (
    GRIPPER_DOWN,
    BodyPoint,
    Box,
    rotation_y,
    rotation_z,
    tilt_of,
    world_box,
    wrap_half_turn,
)
from vla_gym.experts.phase_machine import CLOSED, OPEN, Phase, Vector, hold

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

# The funnel through which the hand comes down: height over radius, and top and end in metres.
# Below its end the fingers are around the object and keep the hand in place.
FUNNEL_SLOPE, FUNNEL_TOP, FUNNEL_END = 4.0, 0.08, 0.015
# The descent looks no further ahead than this, metres, or it would take the whole speed.
FUNNEL_STEP = 0.02
# An error along the object's edge matters less than one along the fingers' axis.
TANGENT_WEIGHT = 0.5
# Yaws that a pinch from above chooses from.
YAWS = (0.0, np.pi / 2.0, np.pi / 4.0, -np.pi / 4.0)
# It is at least this far above the object's lowest point: finger tips reach 1.2 cm further, metres.
MIN_HEIGHT = 0.014


@dataclass(frozen=True)
class Grasp:
    """A grip-site pose that follows an object.

    Attributes:
        point: Called for the world position (3,) of the grip site.
        rotation: (3, 3) orientation of the grip site.
    """

    point: Vector
    rotation: np.ndarray

    def retracted(self, distance: float) -> np.ndarray:
        """Return the point (3,) that lies ``distance`` metres before the grasp point."""
        return self.point() - self.rotation[:, 2] * distance

    def approach(self, position: np.ndarray, radius: float) -> np.ndarray:
        """Return where the descent goes (3,): a hand that is beside the line stays above first.

        Without it the descent outruns the sideways correction, and a finger lands on the object.

        Args:
            position: (3,) present position of the grip site.
            radius: Distance from the line at which the descent may end, metres; nearer than this
                to the returned point is then nearer than this to the grasp point too.
        """
        along = self.rotation.T @ (self.point() - position)
        beside = float(np.hypot(along[0], along[1] * TANGENT_WEIGHT))
        lift = min(FUNNEL_SLOPE * max(beside - radius, 0.0), FUNNEL_TOP)
        if along[2] < FUNNEL_END:
            lift = 0.0
        return self.retracted(max(lift, along[2] - FUNNEL_STEP))


def rim_grasp(
    sim: LiberoSim,
    body: str,
    angle: float,
    box: Box | None = None,
    /,
    *,
    inset: float,
    depth: float,
    tilt: float = 0.0,
) -> Grasp:
    """Straddle the wall of a round open object (bowl, plate) from above.

    Args:
        sim: Simulation.
        body: Body of an object that is round about the vertical axis.
        angle: World polar angle of the rim point, radians.
        box: Present bounds of the rim, of a body that has more beside it (a mug's handle); None:
            the body's.
        inset: Distance of the grip site inside the outermost radius, metres.
        depth: Distance of the grip site below the highest point, metres.
        tilt: How far the hand leans outward, radians.
    """
    box = box or world_box(sim, body)
    radius = float(np.mean(box.size[:2])) / 2.0 - inset
    center = BodyPoint.at(sim, body, box.center)
    height = box.high[2] - depth - box.center[2]
    offset = np.array([radius * np.cos(angle), radius * np.sin(angle), height])
    # The fingers open along world y when the yaw is 0; they must open along the radius.
    yaw = wrap_half_turn(angle - np.pi / 2.0)
    lean = rotation_z(angle) @ rotation_y(tilt) @ rotation_z(-angle)
    return Grasp(lambda: center() + offset, lean @ rotation_z(yaw) @ GRIPPER_DOWN)


def tilted_rim_grasp(
    sim: LiberoSim, body: str, angle: float, *, inset: float, depth: float
) -> Grasp:
    """Straddle the wall of a bowl that may stand askew; the hand leans as the bowl does.

    Arguments as in :func:`rim_grasp`, measured in the bowl's own frame turned so that its axis
    points up. For an upright bowl both grasps are the same.
    """
    tilt = tilt_of(sim.body_mat(body))
    corners = (sim.collision_corners(body) - sim.body_pos(body)) @ tilt
    low, high = corners.min(axis=0), corners.max(axis=0)
    radius = float(np.mean((high - low)[:2])) / 2.0 - inset
    middle = (low + high) / 2.0
    center = BodyPoint.at(sim, body, sim.body_pos(body) + tilt @ middle)
    height = high[2] - depth - middle[2]
    offset = tilt @ np.array([radius * np.cos(angle), radius * np.sin(angle), height])
    yaw = wrap_half_turn(angle - np.pi / 2.0)
    return Grasp(lambda: center() + offset, tilt @ rotation_z(yaw) @ GRIPPER_DOWN)


def top_grasp(
    sim: LiberoSim, body: str, *, below_top: float = 0.03, yaws: Sequence[float] = YAWS
) -> Grasp:
    """Pinch an object from above across its narrowest width.

    Args:
        sim: Simulation.
        body: Body to grasp.
        below_top: Distance of the grip site below the object's top, metres.
        yaws: Yaws of the hand to choose from; the first wins ties within 4 mm.
    """
    corners = sim.collision_corners(body)
    box = world_box(sim, body)
    best_yaw, best_width = yaws[0], np.inf
    for yaw in yaws:
        finger_axis = (rotation_z(yaw) @ GRIPPER_DOWN)[:, 0]
        width = float(np.ptp(corners @ finger_axis)) + (0.0 if yaw == yaws[0] else 0.004)
        if width < best_width - 1e-4:
            best_yaw, best_width = yaw, width
    height = max(box.low[2] + MIN_HEIGHT, box.high[2] - below_top)
    point = BodyPoint.at(sim, body, np.array([box.center[0], box.center[1], height]))
    return Grasp(point, rotation_z(best_yaw) @ GRIPPER_DOWN)


def pick_phases(
    sim: LiberoSim,
    grasp: Grasp,
    *,
    hover: float = 0.10,
    tolerance: float = 0.008,
    close_steps: int = 9,
    funnel: bool = True,
) -> list[Phase]:
    """Return the phases hover, descend, close.

    Args:
        sim: Simulation.
        grasp: Where to grasp.
        hover: Distance from the grasp point at which the gripper first aligns, metres.
        tolerance: Accuracy of the descent, metres.
        close_steps: Control steps for closing the fingers.
        funnel: Descend as :meth:`Grasp.approach` says; False: straight to the grasp point.
    """

    def approach() -> np.ndarray:
        return grasp.approach(sim.eef_pose()[0], tolerance)

    return [
        Phase(
            "hover",
            lambda: grasp.retracted(hover),
            grasp.rotation,
            OPEN,
            tolerance=0.02,
            rotation_tolerance=0.15,
            max_steps=80,
        ),
        Phase(
            "descend",
            approach if funnel else grasp.point,
            grasp.rotation,
            OPEN,
            tolerance=tolerance,
            max_steps=50,
            speed=0.8,
        ),
        hold("close", grasp.point, close_steps, CLOSED, grasp.rotation),
    ]
