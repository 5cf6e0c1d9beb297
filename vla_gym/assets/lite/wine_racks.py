"""A wine rack: two sloping planks with stoppers on a stand."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Extent, block, box, new_object, turn

# The planks rise towards +y; 31 degrees lift their far edge by 8 cm.
SLOPE = 0.5455


def wine_rack() -> ET.Element:
    """Return the rack; LIBERO's ``top_region`` lies above the upper plank's lower edge."""
    root, body = new_object("wine_rack_stand", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.15275, (0.0022, 0.0020, 0.0011), (0, -0.0122, 0.1111))
    region = box((0.10087, 0.022, 0.00251), (0, -0.08003, 0.21745), turn("x", -1.0910))
    body.site("top_region", region)
    plank = (0.134, 0.079, 0.0045)
    body.solid(box(plank, (0, -0.0061, 0.2512), turn("x", SLOPE)), palette.RACK_PLANK)
    body.solid(box(plank, (0, -0.0427, 0.1273), turn("x", SLOPE)), palette.RACK_PLANK)
    lip = (0.132, 0.0087, 0.0020)
    across = turn("x", SLOPE + math.pi / 2)
    body.solid(box(lip, (0, -0.0748, 0.2207), across), palette.RACK_STOPPER)
    body.solid(box(lip, (0, -0.1091, 0.0974), across), palette.RACK_STOPPER)
    body.solid(block((-0.090, -0.124, 0.002), (0.090, 0.129, 0.0110)), palette.RACK_STAND)
    body.solid(block((-0.090, -0.014, 0.011), (0.090, 0.014, 0.025)), palette.RACK_STAND)
    mast = box((0.0091, 0.0076, 0.1580), (0, 0.0089, 0.1720), turn("x", -0.276))
    body.solid(mast, palette.RACK_STAND)
    return root
