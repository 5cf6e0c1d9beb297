"""Put the black bowl on the plate from wherever it starts: every task of the suite ``spatial``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.grasps import tilted_rim_grasp
from vla_gym.experts.phase_machine import Expert
from vla_gym.experts.pick_and_place import (
    BOWL,
    BOWL_RIM,
    PLATE,
    Placement,
    offset_target,
    pick_and_place_phases,
    repeated_until_success,
)

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

# The bowl passes over what it stands on, and never lower than this (the table is at 0.90 m).
MIN_TRAVEL_HEIGHT, LIFT = 1.08, 0.13
# Held by one side the bowl hangs askew: out of a drawer it must rise further, or its far side
# meets the front.
DRAWER_LIFT = 0.19


def bowl_on_plate_from(angle_degrees: float, lift: float = LIFT) -> Callable[[LiberoSim], Expert]:
    """Return a builder of experts that put the bowl on the plate.

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
