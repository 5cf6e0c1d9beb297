"""A wooden shelf with two layers, open to the front."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Extent, block, box, new_object, turn


def wooden_two_layer_shelf() -> ET.Element:
    """Return the shelf, 35 x 19 x 21 cm: the lower layer stands on the table, 6.9 cm high."""
    root, body = new_object("wooden_two_layer_shelf", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.20633, (0.0017, 0.0046, 0.0044), (0.0046, 0.0416, 0.1172))
    body.site("top_side", box((0.17557, 0.09438, 0.00147), (0.00496, 0.01567, 0.20688)))
    # Regions turned by a quarter about y: their first half size is the height.
    upper = box((0.06739, 0.08564, 0.15093), (0.00538, 0.01687, 0.13672), turn("y", -math.pi / 2))
    body.site("top_region", upper)
    lower = box((0.03528, 0.08564, 0.15580), (0.00555, 0.01687, 0.01407), turn("y", math.pi / 2))
    body.site("bottom_region", lower)
    for low, high, rgba in (
        ((-0.1609, -0.0792, 0.0002), (-0.1467, 0.1117, 0.2060), palette.SHELF_SIDE),
        ((0.1560, -0.0792, 0.0002), (0.1702, 0.1117, 0.2060), palette.SHELF_SIDE),
        ((-0.1467, 0.1071, 0.0002), (0.1560, 0.1117, 0.2060), palette.SHELF_SIDE),
        ((-0.1467, -0.0709, 0.0689), (0.1560, 0.1071, 0.0712), palette.SHELF_BOARD),
        ((-0.1708, -0.0790, 0.2060), (0.1807, 0.1117, 0.2104), palette.SHELF_TOP),
    ):
        body.solid(block(low, high), rgba)
    return root
