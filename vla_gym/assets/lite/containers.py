"""Open containers of wood: the basket and the tray."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette as palette
from vla_gym.assets.lite.mjcf import Extent, block, box, new_object, turn


def basket() -> ET.Element:
    """Return a basket of 15 x 14 cm inside its upper edge and 14 cm height; its walls lean out."""
    root, body = new_object("basket", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.13611, (6.39e-4, 6.84e-4, 8.17e-4), (0.0013, 0.0001, 0.0609))
    region = box((0.06108, 0.06108, 0.06949), (0, 0, 0.07185), (0, 0, 0, 1))
    body.site("contain_region", region)
    floor = block((-0.0741, -0.0724, 0.0046), (0.0791, 0.0724, 0.0216))
    body.solid(floor, palette.BASKET_FLOOR)
    wall = (0.0067, 0.0724, 0.0637)
    for x, tilt in ((-0.0727, -0.0756), (0.0756, 0.0499)):
        body.solid(box(wall, (x, 0, 0.0766), turn("y", tilt)), palette.BASKET)
    wall = (0.0724, 0.0067, 0.0637)
    for y, tilt in ((-0.0685, 0.0449), (0.0691, -0.0449)):
        body.solid(box(wall, (0, y, 0.0818), turn("x", tilt)), palette.BASKET_END)
    return root


def wooden_tray() -> ET.Element:
    """Return a tray of 29 x 16 cm with low walls and a raised handle at both ends."""
    root, body = new_object("wooden_tray", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.05715, (2.32e-4, 6.07e-4, 7.90e-4), (0.0076, -0.0054, 0.0187))
    # The region is turned by a quarter: its first half size is the height.
    region = box((0.04038, 0.07839, 0.13549), (0.00863, -0.00471, 0.04255), turn("y", math.pi / 2))
    body.site("contain_region", region)
    left, right, front, back = -0.1394, 0.1535, -0.0868, 0.0781
    body.solid(block((left, front, -0.0006), (right, back, 0.0074)), palette.TRAY_FLOOR)
    for y in (front, back - 0.0046):
        body.solid(block((left, y, 0.0038), (right, y + 0.0046, 0.0610)), palette.TRAY)
    for x, inner in ((-0.1415, -0.1321), (0.1555, 0.1453)):
        edge = x + math.copysign(0.0046, inner - x)
        ends = (min(x, edge), max(x, edge))
        body.solid(block((ends[0], front, 0.0053), (ends[1], back, 0.0545)), palette.TRAY)
        rail = block((inner - 0.0075, front, 0.0745), (inner + 0.0075, back, 0.0809))
        body.solid(rail, palette.TRAY_POST)
        for y in (-0.0785, 0.0685):
            post = block((inner - 0.0062, y - 0.0055, 0.0016), (inner + 0.0062, y + 0.0055, 0.0745))
            body.solid(post, palette.TRAY_POST)
    return root
