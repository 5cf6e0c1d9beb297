"""A desk caddy: four compartments for books and mugs."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Body, Extent, Shape, block, box, new_object, turn

HALF_TURN = turn("y", math.pi)
# The side walls of the left compartment fall towards the front (-x) by this angle.
SLOPE = math.radians(35)


def desk_caddy() -> ET.Element:
    """Return the caddy, 15 x 43 x 17 cm, high at the back (+x).

    From -y to +y: the deep right compartment; the back and front compartments, parted by a low
    divider; the left compartment, whose side walls slope.
    """
    root, body = new_object("desk_caddy", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.27796, (0.0056, 0.0014, 0.0055), (0.0041, -0.0230, 0.0567))
    deep = (0.06196, 0.06216, 0.06046)
    for side, y in (("right", -0.14339), ("left", 0.14551)):
        body.site(f"{side}_contain_region", box(deep, (0.00631, y, 0.06558), HALF_TURN))
    back = box((0.02775, 0.06216, 0.06046), (0.03364, -0.00064, 0.08558), HALF_TURN)
    body.site("back_contain_region", back)
    # LIBERO's: half a turn about the line between y and -z.
    tilted = (0, 0, math.sqrt(0.5), -math.sqrt(0.5))
    front = box((0.02775, 0.03595, 0.06216), (-0.03102, -0.00064, 0.04054), tilted)
    body.site("front_contain_region", front)
    _walls(body)
    for y in (0.0671, 0.2046):
        body.solids(_sloping_wall(y, y + 0.0072), palette.CADDY)
    return root


def _walls(body: Body) -> None:
    top = 0.1674
    body.solid(block((-0.0755, -0.2169, 0.0014), (0.0755, 0.2169, 0.0138)), palette.CADDY_FLOOR)
    for y in (-0.2156, -0.0742):
        body.solid(block((-0.0706, y, 0.0138), (0.0706, y + 0.0124, top)), palette.CADDY)
    body.solid(block((0.0628, -0.2098, 0.0138), (0.0708, 0.2098, 0.1683)), palette.CADDY)
    body.solid(block((-0.0709, -0.2098, 0.0138), (-0.0628, 0.2098, 0.0741)), palette.CADDY)
    body.solid(block((-0.0709, -0.2164, 0.0741), (-0.0628, -0.0631, top)), palette.CADDY)
    divider = block((-0.0056, -0.0668, 0.0138), (0.0025, 0.0668, 0.0987))
    body.solid(divider, palette.CADDY_DIVIDER)


def _sloping_wall(near: float, far: float) -> list[Shape]:
    """Return a wall between two y whose upper edge rises from 8 to 15 cm."""
    half, centre = (0.0706, (far - near) / 2, 0.0209), (0, (near + far) / 2, 0.0945)
    return [
        block((-0.0706, near, 0.0138), (0.0706, far, 0.0785)),
        box(half, centre, turn("y", -SLOPE)),
        block((0.0120, near, 0.0785), (0.0665, far, 0.1180)),
    ]
