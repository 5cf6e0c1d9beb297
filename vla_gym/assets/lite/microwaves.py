"""A microwave oven: a cavity, a control panel and a hinged door with a handle to hook."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Body, Extent, block, box, capsule, new_object, turn

# LIBERO's oven touches what other bodies bring (their contype), but never itself: the door closes
# through the walls' edges. Its contacts are softer than those of other objects.
CONTACT = {
    "contype": "0",
    "conaffinity": "1",
    "margin": "0.001",
    "solimp": "0.8 0.9 0.01",
    "solref": "0.02 1",
}


def microwave() -> ET.Element:
    """Return the oven, 34 x 22 x 19 cm; its cavity is 20.7 x 16.9 x 14.4 cm, open to -y."""
    root, body = new_object("microwave", Extent(-0.06, 0.06, 0.015))
    body.inertial(3.0, (0.0280, 0.0492, 0.0517), (-0.0051, 0.0021, 0.0939))
    body.site("top_side", box((0.12, 0.0835, 0.005), (0, 0.01, 0.20)))
    body.site("heating_region", box((0.12, 0.0835, 0.08), (0, 0.01, 0.096)))
    shell = palette.MICROWAVE
    top = 0.187
    for low, high, rgba in (
        ((-0.1725, -0.0880, 0), (-0.1435, 0.1110, top), shell),
        ((0.0635, -0.0880, 0), (0.1725, 0.1110, top), shell),
        ((-0.1440, 0.0805, 0), (0.0630, 0.1105, top), shell),
        ((-0.1435, -0.0880, 0.168), (0.0635, 0.0810, top), shell),
        ((-0.1435, -0.0880, 0), (0.0635, 0.0800, 0.024), shell),
        ((0.0875, -0.1105, 0), (0.1725, -0.0865, top), palette.MICROWAVE_PANEL),
    ):
        body.solid(block(low, high), rgba, contact=CONTACT)
    # The lit cavity, seen when the door is open.
    inside = palette.MICROWAVE_INSIDE
    body.visual(block((-0.1425, 0.0785, 0.0245), (0.0625, 0.0803, 0.1675)), inside)
    body.visual(block((-0.1425, -0.0860, 0.0238), (0.0625, 0.0800, 0.0245)), inside)
    body.visual(block((0.1000, -0.1125, 0.012), (0.1600, -0.1100, 0.030)), palette.STEEL)
    body.visual(block((0.1000, -0.1125, 0.130), (0.1600, -0.1100, 0.165)), palette.MICROWAVE_WINDOW)
    _door(body.child("microdoorroot", (-0.1725, -0.088, 0.096)))
    return root


def _door(body: Body) -> None:
    """Add the door, hinged at its left edge: negative angles open it, up to 120 degrees."""
    body.inertial(0.26, (0.0008, 0.0024, 0.0017), (0.1544, -0.0199, 0))
    body.joint("hinge", "microjoint", (0, 0, 1), (-2.094, 0), 0.5)
    body.solid(
        box((0.1295, 0.012, 0.0925), (0.1295, -0.013, 0)), palette.MICROWAVE, contact=CONTACT
    )
    window = box((0.0870, 0.0130, 0.0610), (0.1300, -0.013, 0))
    body.visual(window, palette.MICROWAVE_WINDOW)
    # The bar is 2 cm thick and 3 cm in front of the door: a finger fits behind it.
    body.solid(capsule(0.01, 0.065, (0.2375, -0.054, 0)), palette.STEEL, contact=CONTACT)
    for z in (0.065, -0.065):
        across = capsule(0.01, 0.015, (0.2375, -0.0375, z), turn("x", math.pi / 2))
        body.solid(across, palette.STEEL, contact=CONTACT)
