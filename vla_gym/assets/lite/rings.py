"""Round tableware (bowls, plates): a flat base and rings of tilted boxes."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import (
    Body,
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


def ring(tier: Tier) -> list[Shape]:
    """Return the boxes of one tier, wide enough that neighbours meet at the upper edge."""
    dr, dz = tier.high[0] - tier.low[0], tier.high[1] - tier.low[1]
    tilt, length = math.atan2(dr, dz), math.hypot(dr, dz)
    radius, height = (tier.low[0] + tier.high[0]) / 2, (tier.low[1] + tier.high[1]) / 2
    width = (max(tier.low[0], tier.high[0]) + tier.thickness / 2) * math.tan(math.pi / tier.sides)
    shapes = []
    for i in range(tier.sides):
        angle = 2 * math.pi * i / tier.sides
        centre = (radius * math.cos(angle), radius * math.sin(angle), height)
        rotation = compose(turn("z", angle), turn("y", tilt))
        shapes.append(box((tier.thickness / 2, width, length / 2), centre, rotation))
    return shapes


def _add(body: Body, shapes: list[Shape], rgba: Vector) -> None:
    for shape in shapes:
        body.solid(shape, rgba)


def akita_black_bowl() -> ET.Element:
    """Return a bowl of 10.6 cm diameter whose rim is 5.2 cm above the body's origin.

    The upper wall is steep (13 degrees from upright) so that two parallel finger pads hold it; the
    foot's underside is 1.6 mm above the origin, where LIBERO's bowl touches the table.
    """
    root, body = new_object("akita_black_bowl", Extent(-0.06, 0.04, 0.025), (0, -0.1, 0))
    body.inertial(0.00559, (6.0e-6, 6.0e-6, 9.0e-6), (0, 0, 0.0227))
    _add(body, ring(Tier(12, (0.0428, 0.0155), (0.0508, 0.0515), 0.0032)), palette.BOWL_OUTSIDE)
    _add(body, ring(Tier(8, (0.0250, 0.0045), (0.0432, 0.0165), 0.0030)), palette.BOWL_OUTSIDE)
    body.solid(block((-0.021, -0.021, 0.0016), (0.021, 0.021, 0.0068)), None)
    body.visual(cylinder(0.027, 0.0016, 0.0068), palette.BOWL_INSIDE)
    return root


def plate() -> ET.Element:
    """Return a plate of 13.5 cm diameter with a rim that rises to 1.6 cm above the origin.

    It stands 2.5 mm below the origin, as LIBERO's does, and its floor is 6 mm above it.
    """
    root, body = new_object("model", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.01152, (1.4e-5, 1.4e-5, 2.7e-5), (0, 0, 0.0064))
    _add(body, ring(Tier(12, (0.0360, 0.0020), (0.0660, 0.0135), 0.0045)), palette.PLATE)
    body.solid(block((-0.034, -0.034, -0.0025), (0.034, 0.034, 0.0060)), None)
    body.visual(cylinder(0.041, -0.0025, 0.0061), palette.PLATE_CENTRE)
    return root
