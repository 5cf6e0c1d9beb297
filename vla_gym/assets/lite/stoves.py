"""A flat stove: one burner plate and a knob with a bar to turn."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import (
    Body,
    Extent,
    Shape,
    block,
    box,
    cylinder,
    new_object,
    turn,
)


def flat_stove() -> ET.Element:
    """Return the stove: a 19 cm plate with a burner, and a hinged knob 15 cm beside it."""
    root, body = new_object("flat_stove", Extent(-0.045, 0.045, 0.045, 0.05))
    base = body.child("base")
    burner = base.child("burner", (0.15, 0, 0))
    burner.inertial(1.4801, (0.0047, 0.0047, 0.0089))
    burner.site("cook_region", box((0.075, 0.075, 0.0025), (0, 0, 0)))
    burner.solid(box((0.095, 0.095, 0.02), (0, 0, 0)), palette.STOVE, "base")
    # LIBERO's cooking surface: a thin invisible plate 5 mm above the box.
    burner.solid(box((0.095, 0.095, 0.0005), (0, 0, 0.025)), None, "collision_burner")
    burner.child("burner_plate").visual(cylinder(0.078, 0.02, 0.0206), palette.BURNER)
    burner.visual(cylinder(0.054, 0.0205, 0.0209), palette.BURNER_RING)
    burner.visual(cylinder(0.040, 0.0208, 0.0212), palette.BURNER)
    burner.visual(cylinder(0.020, 0.0211, 0.0214), palette.BURNER_RING)
    # LIBERO shows this site while the stove is on.
    glow = Shape("cylinder", (0.0625, 0.0005), (0, 0, 0.022))
    burner.site("burner", glow, (0.9, 0.05, 0.05, 1))
    _knob(base.child("button", quat=turn("z", math.pi / 2)))
    return root


def _knob(body: Body) -> None:
    """Add the knob; its bar is 2.4 cm thick, lies along the body's y axis and is 5 cm high."""
    body.inertial(3.0, (1.0, 1.0, 1.0))
    body.joint("hinge", "button", (0, 0, 1), (-0.005, 2.1), 1.0)
    body.solid(cylinder(0.046, 0.0004, 0.0128), palette.KNOB_DISC)
    body.solid(block((-0.0108, -0.0170, 0.0014), (0.0135, 0.0519, 0.0500)), palette.KNOB)
    body.solid(block((-0.0108, -0.0410, 0.0014), (0.0135, -0.0170, 0.0340)), palette.KNOB)
