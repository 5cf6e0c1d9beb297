"""Move the plate over the table to the front of the stove."""

from __future__ import annotations

import numpy as np

from vla_gym.experts.grasps import pick_phases, rim_grasp
from vla_gym.experts.phase_machine import CLOSED, OPEN, Expert, Phase, hold
from vla_gym.experts.pick_and_place import PLATE
from vla_gym.experts.privileged import PrivilegedSim

STOVE_FRONT = "main_table_stove_front_region"
# Polar angle of the rim point that is pinched.
PINCH_ANGLE = 0.5
PLATE_RIM = {"inset": 0.003, "depth": 0.0025}
DRAG_LIFT = 0.003
REACHED = 0.04


class Drag:
    """Phases that pull a pinched plate to a region, pinching again when it slips."""

    def __init__(self, sim: PrivilegedSim) -> None:
        """Describe the drag; the plate is measured when it begins."""
        self._sim = sim
        self._grasp = rim_grasp(sim, PLATE, PINCH_ANGLE, **PLATE_RIM)
        self._offset = np.zeros(3)
        self._height = 0.0

    def phases(self) -> list[Phase]:
        """Return pick, drag, release, rise."""
        picking = pick_phases(self._grasp, close_steps=10)
        rotation = self._grasp.rotation
        return [
            *picking,
            Phase(
                "drag",
                self._drag_target,
                rotation,
                CLOSED,
                tolerance=0.01,
                max_steps=110,
                speed=0.6,
                check=self._arrived,
                retry_from=picking[0].name,
                on_enter=self._measure,
            ),
            hold("release", self._drag_target, 5, OPEN, rotation),
            Phase("rise", self._rise_target, rotation, OPEN, tolerance=0.02, max_steps=20),
        ]

    def _measure(self) -> None:
        position = self._sim.eef_pose()[0]
        self._offset = position - self._sim.body_pos(PLATE)
        self._height = position[2] + DRAG_LIFT

    def _arrived(self) -> bool:
        gap = self._sim.body_pos(PLATE) - self._sim.site_pos(STOVE_FRONT)
        return bool(np.linalg.norm(gap[:2]) < REACHED)

    def _drag_target(self) -> np.ndarray:
        point = self._sim.site_pos(STOVE_FRONT) + self._offset
        point[2] = self._height
        return point

    def _rise_target(self) -> np.ndarray:
        return self._drag_target() + np.array([0.0, 0.0, 0.10])


def plate_to_stove_front(sim: PrivilegedSim) -> Expert:
    """Drag the plate to the front of the stove.

    It is pinched by the rim and pulled: behind it there is no room for the hand (the cabinet's
    handles), and a hand that presses on it from above slides off.
    """
    return Expert(sim, Drag(sim).phases())
