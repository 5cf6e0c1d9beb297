"""Turn the stove's knob."""

from __future__ import annotations

import numpy as np

from vla_gym.experts.geometry import GRIPPER_DOWN, BodyPoint, rotation_z, world_box
from vla_gym.experts.grasps import Grasp, pick_phases
from vla_gym.experts.phase_machine import CLOSED, Expert, Phase
from vla_gym.experts.privileged import PrivilegedSim

KNOB = "flat_stove_1_button"
# The knob's bar lies along world x (its narrow width along y, the fingers' axis).
BAR_OFFSET = np.array([0.02, 0.0])
BELOW_TOP = 0.020
TURN = 0.9


def turn_on_stove(sim: PrivilegedSim) -> Expert:
    """Pinch the bar of the knob and turn it; pushing it with closed fingers jams half-way."""
    pivot = sim.body_pos(KNOB)
    top = world_box(sim, KNOB).high[2]
    world = np.array([*(pivot[:2] + BAR_OFFSET), top - BELOW_TOP])
    point = BodyPoint.at(sim, KNOB, world)
    held = np.array(world)
    grasp = Grasp(lambda: held, GRIPPER_DOWN)
    turn = Phase(
        "turn",
        lambda: held,
        rotation_z(TURN) @ GRIPPER_DOWN,
        CLOSED,
        tolerance=0.0,
        max_steps=60,
    )
    del point
    return Expert(sim, [*pick_phases(grasp, close_steps=8), turn])
