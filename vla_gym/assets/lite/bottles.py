"""Bottles: a body, a shoulder and a neck thin enough for the gripper."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Extent, block, cylinder, ellipsoid, new_object
from vla_gym.assets.lite.standing import octagon


def wine_bottle() -> ET.Element:
    """Return a bottle of 3.9 cm diameter and 15.8 cm height that stands on its origin."""
    root, body = new_object("wine_bottle_red_main", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.01539, (2.29e-5, 2.29e-5, 2.54e-6), (0, 0, 0.0561))
    low, shoulder, neck, top = 0.0011, 0.0734, 0.092, 0.158
    wide, thin = 0.0195, 0.0078
    column = octagon(wide * math.cos(math.pi / 8), low, shoulder)
    body.solids([column[i] for i in (0, 2, 1, 3)], None)  # contacts depend on the order
    body.solid(block((-0.0125, -0.0125, shoulder - 0.01), (0.0125, 0.0125, 0.086)), None)
    body.solid(block((-0.0072, -0.0072, shoulder), (0.0072, 0.0072, top)), None)
    body.visual(cylinder(wide, low, shoulder), palette.GLASS)
    body.visual(ellipsoid((wide, wide, neck - shoulder), (0, 0, shoulder)), palette.GLASS)
    body.visual(cylinder(thin, shoulder, top - 0.02), palette.GLASS)
    body.visual(cylinder(thin * 1.08, top - 0.02, top), palette.CORK)
    body.visual(cylinder(wide * 1.02, low + 0.018, shoulder - 0.014), palette.BOTTLE_LABEL)
    return root
