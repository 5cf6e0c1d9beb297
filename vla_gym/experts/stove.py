"""Turn the stove's knob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vla_gym.experts.geometry import GRIPPER_DOWN, rotation_z, world_box, wrap_half_turn
from vla_gym.experts.grasps import Grasp, pick_phases
from vla_gym.experts.phase_machine import CLOSED, Expert, Phase

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

KNOB = "flat_stove_1_button"
# Where the knob's bar is pinched, in the knob's frame: the bar lies along y and is 2.4 cm thick.
BAR_POINT = np.array([0.0, -0.02, 0.0])
BELOW_TOP = 0.020
# The knob counts as on from 0.5 rad; the gripper slips a little against it.
TURN = 0.9


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
