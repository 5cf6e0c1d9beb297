"""Pick an object up, carry it above everything, put it down: bowl, cream cheese, wine bottle.

Tasks of the suite ``goal``, and every one of ``spatial``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.grasps import Grasp, pick_phases, rim_grasp, tilted_rim_grasp, top_grasp
from vla_gym.experts.phase_machine import CLOSED, OPEN, Expert, Phase, Vector, hold

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

BOWL = "akita_black_bowl_1_main"
PLATE = "plate_1_main"
CREAM_CHEESE = "cream_cheese_1_main"
WINE_BOTTLE = "wine_bottle_1_main"

# Grip site inside the bowl's outermost radius and below its rim. Shallower than 1.5 cm the
# wall slips out of the fingers in about a quarter of the tries.
BOWL_RIM = {"inset": 0.0056, "depth": 0.022}
# How far a body may move against the gripper, and how high that rises after the release: metres.
MAX_SLIP, RETREAT = 0.03, 0.12
# A body that is turned for its place is turned to within this angle before it is lowered, radians.
TURNED = 0.05
RELEASE_STEPS = 4  # control steps for opening the fingers
# Travel height above the place where the bowl stood, at least 1.08 m (the table is at 0.90 m). Held
# by one side it hangs askew: out of a drawer it must rise further, or its far side meets the front.
MIN_TRAVEL_HEIGHT, LIFT, DRAWER_LIFT = 1.08, 0.13, 0.19


@dataclass(frozen=True)
class Placement:
    """Where a held object goes.

    Attributes:
        target: Called for the wanted world position (3,) of the object's body frame.
        travel_height: World height of the grip site while carrying, metres.
        drop: Height above ``target`` at which the fingers open, metres.
        tolerance: Accuracy of the last descent, metres.
        lower_steps: Most control steps for the last descent.
        pull_out: World offset by which the object is moved before it is lifted, out from under
            something; None: lifted straight up.
        push_in: World offset from ``target`` from which the object comes and to which the hand goes
            back, into something from the side; None: down from the travel height.
        until: Lower again as long as this does not hold, then let go; None: always let go.
        rotation: (3, 3) orientation of the grip site from the transport on; None: as grasped.
    """

    target: Vector
    travel_height: float
    drop: float = 0.0
    tolerance: float = 0.012
    lower_steps: int = 50
    until: Callable[[], bool] | None = None
    pull_out: tuple[float, float, float] | None = None
    push_in: tuple[float, float, float] | None = None
    rotation: np.ndarray | None = None


class Carry:
    """Phases that lift a grasped body and put it at a placement.

    The offset between grip site and body is measured when the lift begins and again before the
    descent, since a body may turn between the fingers. It is taken for lost when the point where
    it was grasped has moved more than MAX_SLIP against the gripper.
    """

    def __init__(self, sim: LiberoSim, body: str, grasp: Grasp, placement: Placement) -> None:
        """Describe the carry; nothing is measured before its first phase begins."""
        self._sim = sim
        self._body = body
        self._grasp = grasp
        self._placement = placement
        self._offset = np.zeros(3)
        self._held_at = np.zeros(3)
        self._lift_from = np.zeros(3)

    def phases(self, retry_from: str) -> list[Phase]:
        """Return lift, transport, lower, release, retreat; a lost body restarts the pick."""
        place, grasped = self._placement, self._grasp.rotation
        rotation = grasped if place.rotation is None else place.rotation
        held = partial(Phase, gripper=CLOSED, guard=self._is_held, retry_from=retry_from)
        # With nothing to pull out from under, the first phase ends in its first step.
        return [
            held(
                "pull out",
                self._pulled_target,
                grasped,
                tolerance=0.02,
                min_steps=0,
                max_steps=20,
                on_enter=self._measure_grasp,
            ),
            held("lift", self._lift_target, grasped, tolerance=0.03, max_steps=40),
            held(
                "transport",
                self._above_target,
                rotation,
                tolerance=0.02,
                rotation_tolerance=None if place.rotation is None else TURNED,
                max_steps=90,
            ),
            Phase(
                "lower",
                self._low_target,
                rotation,
                CLOSED,
                tolerance=place.tolerance,
                max_steps=place.lower_steps,
                speed=0.6,
                check=place.until,
                retry_from="transport" if place.until else None,
                on_enter=self._measure_offset,
            ),
            hold("release", self._low_target, RELEASE_STEPS, OPEN, rotation),
            Phase("retreat", self._retreat_target, rotation, OPEN, tolerance=0.03, max_steps=30),
        ]

    def _is_held(self) -> bool:
        return bool(np.linalg.norm(self._grip_error() - self._held_at) < MAX_SLIP)

    def _grip_error(self) -> np.ndarray:
        return self._sim.eef_pose()[0] - self._grasp.point()

    def _measure_grasp(self) -> None:
        self._lift_from = self._sim.eef_pose()[0]
        self._held_at = self._grip_error()
        self._measure_offset()

    def _measure_offset(self) -> None:
        self._offset = self._sim.eef_pose()[0] - self._sim.body_pos(self._body)

    def _pulled_target(self) -> np.ndarray:
        return self._lift_from + np.array(self._placement.pull_out or (0.0, 0.0, 0.0))

    def _lift_target(self) -> np.ndarray:
        point = self._pulled_target()
        point[2] = max(self._placement.travel_height, point[2] + 0.05)
        return point

    def _above_target(self) -> np.ndarray:
        if self._placement.rotation is not None:
            self._measure_offset()  # it turns with the hand
        point = self._placement.target() + self._offset
        if self._placement.push_in is not None:
            return point + np.array(self._placement.push_in)
        point[2] = max(self._placement.travel_height, point[2] + 0.02)
        return point

    def _low_target(self) -> np.ndarray:
        return self._placement.target() + self._offset + np.array([0.0, 0.0, self._placement.drop])

    def _retreat_target(self) -> np.ndarray:
        return self._low_target() + np.array(self._placement.push_in or (0.0, 0.0, RETREAT))


def pick_and_place_phases(
    sim: LiberoSim,
    body: str,
    grasp: Grasp,
    placement: Placement,
    *,
    hover: float = 0.10,
    close_steps: int = 9,
) -> list[Phase]:
    """Return all phases of one pick and place."""
    picking = pick_phases(sim, grasp, hover=hover, close_steps=close_steps)
    return picking + Carry(sim, body, grasp, placement).phases(retry_from=picking[0].name)


def repeated_until_success(sim: LiberoSim, phases: list[Phase]) -> list[Phase]:
    """Return the phases, begun anew when the last one ends and the goal is not reached."""
    last = replace(phases[-1], check=sim.success, retry_from=phases[0].name)
    rest = replace(phases[-1], name="rest")
    return [*phases[:-1], last, rest]


def offset_target(base: Vector, x: float, y: float, z: float) -> Vector:
    """Return a live point: ``base()`` plus a constant world offset, metres."""
    offset = np.array([x, y, z])
    return lambda: base() + offset


def place_bowl(sim: LiberoSim, placement: Placement) -> list[Phase]:
    """Return the phases that take the bowl by its rim, on the +y side, and place it."""
    grasp = rim_grasp(sim, BOWL, np.pi / 2.0, **BOWL_RIM)
    return pick_and_place_phases(sim, BOWL, grasp, placement)


def bowl_on_plate(sim: LiberoSim) -> Expert:
    """Put the bowl on the plate."""
    target = offset_target(lambda: sim.body_pos(PLATE), 0.0, 0.0, 0.003)
    return Expert(sim, place_bowl(sim, Placement(target, travel_height=1.06, drop=0.004)))


def bowl_on_plate_from(angle_degrees: float, lift: float = LIFT) -> Callable[[LiberoSim], Expert]:
    """Return a builder of experts that put the bowl on the plate from wherever it starts.

    Args:
        angle_degrees: World polar angle at which the bowl is taken by its rim.
        lift: Travel height of the grip site above the place where the bowl stood, metres.
    """

    def build(sim: LiberoSim) -> Expert:
        # On the ramekin's uneven meshes the bowl stands askew.
        grasp = tilted_rim_grasp(sim, BOWL, np.deg2rad(angle_degrees), **BOWL_RIM)
        target = offset_target(lambda: sim.body_pos(PLATE), 0.0, 0.0, 0.003)
        travel_height = max(MIN_TRAVEL_HEIGHT, float(sim.body_pos(BOWL)[2]) + lift)
        placement = Placement(target, travel_height=travel_height, drop=0.004)
        phases = pick_and_place_phases(sim, BOWL, grasp, placement)
        return Expert(sim, repeated_until_success(sim, phases))

    return build


def bowl_on_stove(sim: LiberoSim) -> Expert:
    """Put the bowl on the burner."""
    target = offset_target(lambda: sim.site_pos("flat_stove_1_cook_region"), 0.0, 0.0, 0.03)
    return Expert(sim, place_bowl(sim, Placement(target, travel_height=1.10, drop=0.004)))


def bowl_on_cabinet(sim: LiberoSim) -> Expert:
    """Put the bowl on top of the cabinet."""
    target = offset_target(lambda: sim.site_pos("wooden_cabinet_1_top_side"), 0.0, 0.02, 0.005)
    return Expert(sim, place_bowl(sim, Placement(target, travel_height=1.32, drop=0.004)))


def cream_cheese_in_bowl(sim: LiberoSim) -> Expert:
    """Drop the cream cheese into the bowl."""
    target = offset_target(lambda: sim.body_pos(BOWL), 0.0, 0.0, 0.06)
    placement = Placement(target, travel_height=1.10, tolerance=0.015)
    grasp = top_grasp(sim, CREAM_CHEESE)
    return Expert(sim, pick_and_place_phases(sim, CREAM_CHEESE, grasp, placement))


def _place_bottle(sim: LiberoSim, placement: Placement) -> Expert:
    grasp = top_grasp(sim, WINE_BOTTLE, below_top=0.04)
    phases = pick_and_place_phases(sim, WINE_BOTTLE, grasp, placement, hover=0.14, close_steps=10)
    return Expert(sim, phases)


def bottle_on_cabinet(sim: LiberoSim) -> Expert:
    """Put the wine bottle on top of the cabinet."""
    # 5 cm in front of the middle: the hand stays clear of the wine rack beside the cabinet.
    target = offset_target(lambda: sim.site_pos("wooden_cabinet_1_top_side"), 0.0, 0.05, 0.008)
    return _place_bottle(sim, Placement(target, travel_height=1.30))


def bottle_on_rack(sim: LiberoSim) -> Expert:
    """Stand the wine bottle on the rack.

    The goal holds as soon as the bottle touches the rack inside the region; it need not stay.
    """
    target = offset_target(lambda: sim.site_pos("wine_rack_1_top_region"), 0.0, -0.005, 0.0)
    placement = Placement(
        target, travel_height=1.36, tolerance=0.004, lower_steps=25, until=sim.success
    )
    return _place_bottle(sim, placement)
