"""The frying pan and the moka pot."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette as palette
from vla_gym.assets.lite.mjcf import Extent, box, cylinder, ellipsoid, new_object, turn
from vla_gym.assets.lite.rings import Tier, ring
from vla_gym.assets.lite.standing import octagon


def chefmate_8_frypan() -> ET.Element:
    """Return a pan of 20 cm diameter and 4 cm height with a handle of 13 cm towards +x."""
    root, body = new_object("chefmate_8_frypan", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.05025, (1.23e-4, 2.91e-4, 3.96e-4), (0.0238, -0.0009, 0.0168))
    axis, low, floor = (0.0050, -0.0006), 0.0008, 0.0122
    wall = Tier(12, (0.0770, 0.0050), (0.0975, 0.0390), 0.0072)
    body.solids(ring(wall, axis), palette.PAN)
    body.solids(octagon(0.0720, low, floor, axis), None)
    body.visual(cylinder(0.0790, low, floor, axis), palette.PAN_INSIDE)
    neck = box((0.0260, 0.0108, 0.0060), (0.1195, 0.0, 0.0300), turn("y", -0.33))
    body.solid(neck, palette.PAN_INSIDE)
    handle = box((0.0665, 0.0127, 0.0062), (0.1926, 0.0, 0.0441), turn("y", -0.1288))
    body.solid(handle, palette.PAN_HANDLE)
    return root


def moka_pot() -> ET.Element:
    """Return a silver pot of 15 cm height, 7.4 cm between faces: handle +y, spout -y."""
    root, body = new_object("moka_pot_body", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.06824, (1.43e-4, 1.28e-4, 6.23e-5), (0.0001, 0.0017, 0.0043))
    low, top, knob = -0.0661, 0.0669, 0.0857
    body.solids(octagon(0.0370, low, top), None)
    body.visual(cylinder(0.0385, low, -0.010), palette.POT)
    body.visual(cylinder(0.0310, -0.010, 0.004), palette.POT_WAIST)
    body.visual(cylinder(0.0385, 0.004, 0.055), palette.POT)
    body.visual(ellipsoid((0.0370, 0.0370, 0.0150), (0, 0, 0.055)), palette.POT_WAIST)
    body.solid(box((0.0150, 0.0060, 0.0200), (0, -0.0370, 0.0420)), palette.POT)
    body.solid(box((0.0080, 0.0072, 0.0137), (0, -0.0491, 0.0462)), palette.POT)
    body.solid(box((0.0060, 0.0060, 0.0110), (0, 0, knob - 0.0110)), palette.POT_HANDLE)
    body.solid(box((0.0075, 0.0230, 0.0070), (0, 0.0550, 0.0590)), palette.POT_HANDLE)
    grip = box((0.0066, 0.0071, 0.0330), (0, 0.0720, 0.0310), turn("x", -0.4688))
    body.solid(grip, palette.POT_HANDLE)
    upper = turn("x", -math.atan2(0.6533, 0.7571))
    body.solid(box((0.0066, 0.0141, 0.0070), (0, 0.0755, 0.0539), upper), palette.POT_HANDLE)
    return root
