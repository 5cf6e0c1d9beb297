"""At the stove: turn its knob, or move the plate over the table to its front."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.geometry import GRIPPER_DOWN, rotation_z, world_box, wrap_half_turn
from vla_gym.experts.grasps import Grasp, pick_phases, rim_grasp
from vla_gym.experts.phase_machine import CLOSED, OPEN, Expert, Phase, hold
from vla_gym.experts.pick_and_place import CREAM_CHEESE, PLATE

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

KNOB = "flat_stove_1_button"
# Where the knob's bar is pinched, in the knob's frame: the bar lies along y and is 2.4 cm thick.
BAR_POINT = np.array([0.0, -0.02, 0.0])
BELOW_TOP = 0.020
# The knob counts as on from 0.5 rad; the gripper slips a little against it.
TURN = 0.9

STOVE_FRONT = "main_table_stove_front_region"
# The leading edge is pinched (polar angle, radians): a plate that is pulled follows straight.
# At 0.5 rad, beside it, it turns about the fingers and slips in every other episode.
PINCH_ANGLE = 1.7
PLATE_RIM = {"inset": 0.005, "depth": 0.006}
# All in metres. The rim is raised a little, so that the plate does not stick to the table.
DRAG_LIFT = 0.03
REACHED = 0.04
MAX_SLIP = 0.03
CLEARANCE = 0.012
# From the region's middle towards the side that the plate comes from, away from the cheese.
GOAL_OFFSET = np.array([0.015, 0.015])


def knob_phases(sim: LiberoSim) -> list[Phase]:
    """Return the phases that pinch the knob's bar and turn it.

    Pushing it with closed fingers jams half-way.
    """
    frame = sim.body_mat(KNOB)
    point = sim.body_pos(KNOB) + frame @ BAR_POINT
    point[2] = world_box(sim, KNOB).high[2] - BELOW_TOP
    # The fingers open across the bar, along the knob's x axis. The hand turns on the spot: the bar
    # slides a centimetre through the fingers, which is easier than following its arc.
    yaw = wrap_half_turn(np.arctan2(frame[1, 0], frame[0, 0]) - np.pi / 2.0)
    rotation = rotation_z(yaw) @ GRIPPER_DOWN
    turn = Phase(
        "turn", lambda: point, rotation_z(TURN) @ rotation, CLOSED, tolerance=0.0, max_steps=60
    )
    grasp = Grasp(lambda: point, rotation)
    # So near the base the elbow is at its limit: a hand that waits above drifts away sideways.
    return [*pick_phases(sim, grasp, close_steps=8, funnel=False), turn]


def turn_on_stove(sim: LiberoSim) -> Expert:
    """Turn the knob and keep hold of it."""
    return Expert(sim, knob_phases(sim))


class Drag:
    """Phases that pull a pinched plate to a region, pinching again when it slips.

    The straight way is blocked by the cream cheese, so the plate goes past it first.
    """

    def __init__(self, sim: LiberoSim) -> None:
        """Describe the drag; the plate is measured when it begins."""
        self._sim = sim
        self._grasp = rim_grasp(sim, PLATE, PINCH_ANGLE, **PLATE_RIM)
        self._radius = float(np.max(world_box(sim, PLATE).size[:2])) / 2.0
        self._offset = np.zeros(3)
        self._height = 0.0

    def phases(self) -> list[Phase]:
        """Return pick, drag, release, rise."""
        picking = pick_phases(self._sim, self._grasp, tolerance=0.012, close_steps=10, funnel=False)
        rotation = self._grasp.rotation
        drag = partial(
            Phase,
            rotation=rotation,
            gripper=CLOSED,
            speed=0.6,
            guard=self._is_held,
            retry_from=picking[0].name,
        )
        return [
            *picking,
            drag(
                "drag past obstacle",
                self._past_target,
                tolerance=0.02,
                max_steps=90,
                check=self._passed,
                on_enter=self._measure,
            ),
            drag("drag", self._drag_target, tolerance=0.01, max_steps=60, check=self._arrived),
            hold("release", self._drag_target, 5, OPEN, rotation),
            Phase("rise", self._rise_target, rotation, OPEN, tolerance=0.02, max_steps=20),
        ]

    def _is_held(self) -> bool:
        slip = self._sim.eef_pose()[0] - self._sim.body_pos(PLATE) - self._offset
        return bool(np.linalg.norm(slip[:2]) < MAX_SLIP)

    def _measure(self) -> None:
        position = self._sim.eef_pose()[0]
        self._offset = position - self._sim.body_pos(PLATE)
        self._height = position[2] + DRAG_LIFT

    def _arrived(self) -> bool:
        gap = self._sim.body_pos(PLATE) - self._sim.site_pos(STOVE_FRONT)
        return bool(np.linalg.norm(gap[:2]) < REACHED)

    def _passed(self) -> bool:
        return bool(self._sim.body_pos(PLATE)[1] > self._sim.site_pos(STOVE_FRONT)[1] - 0.03)

    def _grip_target(self, plate_xy: np.ndarray) -> np.ndarray:
        return np.array([*(plate_xy + self._offset[:2]), self._height])

    def _past_target(self) -> np.ndarray:
        goal = self._sim.site_pos(STOVE_FRONT)[:2] + GOAL_OFFSET
        if self._passed():
            return self._grip_target(goal)
        obstacle = world_box(self._sim, CREAM_CHEESE)
        x = max(obstacle.high[0] + self._radius + CLEARANCE, goal[0])
        return self._grip_target(np.array([x, goal[1]]))

    def _drag_target(self) -> np.ndarray:
        return self._grip_target(self._sim.site_pos(STOVE_FRONT)[:2] + GOAL_OFFSET)

    def _rise_target(self) -> np.ndarray:
        return self._drag_target() + np.array([0.0, 0.0, 0.10])


def plate_to_stove_front(sim: LiberoSim) -> Expert:
    """Drag the plate to the front of the stove.

    It is pinched by the rim and pulled: behind it there is no room for the hand (the cabinet's
    handles), and a hand that presses on it from above slides off.
    """
    return Expert(sim, Drag(sim).phases())
