"""Cuboid groceries with a label."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Extent, box, new_object


def cream_cheese() -> ET.Element:
    """Return a lying box of 8.1 x 4.3 x 1.8 cm, narrow enough for the gripper across y."""
    root, body = new_object("cream_cheese", Extent(-0.025, 0.025, 0.03))
    body.inertial(0.00619, (1.10e-6, 3.57e-6, 4.34e-6))
    half = (0.0406, 0.0213, 0.0089)
    body.solid(box(half, (0, 0, 0)), palette.CHEESE)
    label = (half[0] * 0.55, half[1] * 1.01, half[2] * 1.02)
    body.visual(box(label, (0, 0, 0)), palette.CHEESE_LABEL)
    return root
