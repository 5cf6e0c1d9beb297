"""Round tableware (bowls, plates): a flat base and rings of tilted boxes."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from vla_gym.assets.lite import object_palette, palette
from vla_gym.assets.lite.mjcf import (
    Extent,
    Shape,
    Vector,
    block,
    box,
    compose,
    cylinder,
    new_object,
    turn,
)
from vla_gym.assets.lite.standing import octagon


@dataclass(frozen=True)
class Tier:
    """One ring of boxes, a cone frustum.

    Attributes:
        sides: Number of boxes.
        low: (radius, height) of the wall's middle line at its lower edge, in metres.
        high: The same at its upper edge.
        thickness: Wall thickness in metres.
    """

    sides: int
    low: tuple[float, float]
    high: tuple[float, float]
    thickness: float


def ring(tier: Tier, xy: Vector = (0.0, 0.0)) -> list[Shape]:
    """Return the boxes of a tier around ``xy``, so wide that neighbours meet at the upper edge."""
    dr, dz = tier.high[0] - tier.low[0], tier.high[1] - tier.low[1]
    tilt, length = math.atan2(dr, dz), math.hypot(dr, dz)
    radius, height = (tier.low[0] + tier.high[0]) / 2, (tier.low[1] + tier.high[1]) / 2
    width = (max(tier.low[0], tier.high[0]) + tier.thickness / 2) * math.tan(math.pi / tier.sides)
    shapes = []
    for i in range(tier.sides):
        angle = 2 * math.pi * i / tier.sides
        centre = (xy[0] + radius * math.cos(angle), xy[1] + radius * math.sin(angle), height)
        rotation = compose(turn("z", angle), turn("y", tilt))
        shapes.append(box((tier.thickness / 2, width, length / 2), centre, rotation))
    return shapes


def akita_black_bowl() -> ET.Element:
    """Return a bowl of 10.6 cm diameter whose rim is 5.2 cm above the body's origin.

    The upper wall is steep (13 degrees from upright) so that two parallel finger pads hold it; the
    foot's underside is 1.6 mm above the origin, where LIBERO's bowl touches the table.
    """
    root, body = new_object("akita_black_bowl", Extent(-0.06, 0.04, 0.025), (0, -0.1, 0))
    body.inertial(0.00559, (6.0e-6, 6.0e-6, 9.0e-6), (0, 0, 0.0227))
    body.solids(ring(Tier(12, (0.0428, 0.0155), (0.0508, 0.0515), 0.0032)), palette.BOWL_OUTSIDE)
    body.solids(ring(Tier(8, (0.0250, 0.0045), (0.0432, 0.0165), 0.0030)), palette.BOWL_OUTSIDE)
    body.solid(block((-0.021, -0.021, 0.0016), (0.021, 0.021, 0.0068)), None)
    body.visual(cylinder(0.027, 0.0016, 0.0068), palette.BOWL_INSIDE)
    return root


def plate() -> ET.Element:
    """Return a plate of 13.5 cm diameter with a rim that rises to 1.6 cm above the origin.

    It stands 2.5 mm below the origin, as LIBERO's does, and its floor is 6 mm above it.
    """
    root, body = new_object("model", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.01152, (1.4e-5, 1.4e-5, 2.7e-5), (0, 0, 0.0064))
    body.solids(ring(Tier(12, (0.0360, 0.0020), (0.0660, 0.0135), 0.0045)), palette.PLATE)
    body.solid(block((-0.034, -0.034, -0.0025), (0.034, 0.034, 0.0060)), None)
    body.visual(cylinder(0.041, -0.0025, 0.0061), palette.PLATE_CENTRE)
    return root


def white_bowl() -> ET.Element:
    """Return a thin bowl of 8.1 cm diameter and 3.5 cm height that stands on its origin."""
    root, body = new_object("white_bowl", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.002086, (1.17e-6, 1.26e-6, 1.97e-6), (0.0017, 0.0004, 0.0156))
    colour = object_palette.WHITE_BOWL
    body.solids(ring(Tier(12, (0.0320, 0.0105), (0.0392, 0.0347), 0.0024)), colour)
    body.solids(ring(Tier(8, (0.0170, 0.0026), (0.0318, 0.0112), 0.0022)), colour)
    body.solid(block((-0.0165, -0.0165, 0.0006), (0.0165, 0.0165, 0.0042)), None)
    body.visual(cylinder(0.0190, 0.0006, 0.0043), object_palette.WHITE_BOWL_FLOOR)
    return root


def glazed_rim_porcelain_ramekin() -> ET.Element:
    """Return a cup of 8.9 cm diameter and 4.2 cm height with a blue rim; it is hollow.

    Its inside is drawn as a flat disc below the rim, which costs one shape instead of twelve.
    """
    root, body = new_object("glazed_rim_porcelain_ramekin", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.00966, (7.37e-6, 7.99e-6, 1.22e-5), (-0.0025, 0.0001, 0.0168))
    low, top = 0.0007, 0.0427
    body.solids(ring(Tier(12, (0.0352, 0.0014), (0.0413, 0.0423), 0.0052)), None)
    body.solids(octagon(0.0330, low, 0.0073), None)
    body.visual(cylinder(0.0390, low, 0.0330), object_palette.RAMEKIN)
    body.visual(cylinder(0.0440, 0.0330, top), object_palette.RAMEKIN_RIM)
    body.visual(cylinder(0.0385, top, top + 0.0003), object_palette.RAMEKIN_INSIDE)
    return root
