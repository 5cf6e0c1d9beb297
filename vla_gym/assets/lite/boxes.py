"""Cuboid groceries with a label."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette, palette
from vla_gym.assets.lite.mjcf import Extent, block, box, cylinder, new_object


def cream_cheese() -> ET.Element:
    """Return a lying box of 8.1 x 4.3 x 1.8 cm, narrow enough for the gripper across y."""
    root, body = new_object("cream_cheese", Extent(-0.025, 0.025, 0.03))
    body.inertial(0.00619, (1.10e-6, 3.57e-6, 4.34e-6))
    half = (0.0406, 0.0213, 0.0089)
    body.solid(box(half, (0, 0, 0)), palette.CHEESE)
    label = (half[0] * 0.55, half[1] * 1.01, half[2] * 1.02)
    body.visual(box(label, (0, 0, 0)), palette.CHEESE_LABEL)
    return root


def butter() -> ET.Element:
    """Return a lying pale yellow box of 7.6 x 4.0 x 1.7 cm with an orange end."""
    root, body = new_object("textured", Extent(-0.02, 0.02, 0.02))
    body.inertial(0.00525, (8.16e-7, 2.67e-6, 3.22e-6))
    x, y, z = 0.0381, 0.0198, 0.0087
    body.solid(box((x, y, z), (0, 0, 0)), object_palette.BUTTER)
    label = block((0.012, -y * 1.01, -z * 1.02), (x * 1.01, y * 1.01, z * 1.02))
    body.visual(label, object_palette.BUTTER_LABEL)
    return root


def chocolate_pudding() -> ET.Element:
    """Return a lying brown box of 8.0 x 4.6 x 2.7 cm with a pale stripe along it."""
    root, body = new_object("textured", Extent(-0.06, 0.04, 0.025))
    centre = (-0.0005, 0.0, 0.0006)
    body.inertial(0.01019, (2.46e-6, 6.10e-6, 7.28e-6), centre)
    body.solid(box((0.0401, 0.0232, 0.0137), centre), object_palette.PUDDING)
    body.visual(box((0.0404, 0.0080, 0.0140), centre), object_palette.PUDDING_LABEL)
    return root


def cookies() -> ET.Element:
    """Return a lying crimson box of 6.2 x 8.3 x 1.9 cm with two round cookies on its lid."""
    root, body = new_object("textured", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.00964, (5.77e-6, 3.38e-6, 8.58e-6))
    x, y, z = 0.0310, 0.0413, 0.0094
    body.solid(box((x, y, z), (0, 0, 0)), object_palette.COOKIES)
    for side in (-0.02, 0.02):
        disc = cylinder(0.0165, -z - 0.0003, z + 0.0003, (0, side))
        body.visual(disc, object_palette.COOKIES_LABEL)
    return root
