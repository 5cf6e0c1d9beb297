"""Drink cartons with a gable roof."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette as palette
from vla_gym.assets.lite.mjcf import Extent, Vector, block, box, new_object, turn
from vla_gym.assets.lite.standing import StandingBody

HALF, LOW, EAVES, TOP = 0.0263, -0.0697, 0.0398, 0.0614
# The roof's two slabs: slope from the horizontal, half length along it, half thickness.
SLOPE, SLAB, SHEET = 0.736, 0.0138, 0.0022


def milk() -> ET.Element:
    """Return a white carton with a blue band, 5.3 cm wide and 13.1 cm tall."""
    root, element = new_object("textured", Extent(-0.06, 0.04, 0.03))
    body = StandingBody(element.element)
    body.inertial(0.03167, (4.33e-5, 1.45e-5, 4.34e-5), (0.0004, -0.012, 0))
    _carton(body, palette.MILK, palette.MILK_BAND, (-0.052, -0.008))
    return root


def orange_juice() -> ET.Element:
    """Return an orange carton of the same size with a green band."""
    root, element = new_object("textured", Extent(-0.06, 0.04, 0.025))
    body = StandingBody(element.element)
    body.inertial(0.03167, (4.33e-5, 1.45e-5, 4.34e-5), (-0.0004, -0.012, 0))
    _carton(body, palette.JUICE, palette.JUICE_BAND, (0.008, 0.030))
    return root


def _carton(body: StandingBody, colour: Vector, band: Vector, span: tuple[float, float]) -> None:
    body.solid(block((-HALF, -HALF, LOW), (HALF, HALF, EAVES)), colour)
    for side in (-1, 1):
        rotation = turn("x", -side * SLOPE)
        body.solid(box((HALF, SLAB, SHEET), (0, side * 0.0135, 0.0478), rotation), colour)
    body.solid(block((-HALF, -0.0035, TOP - 0.0058), (HALF, 0.0035, TOP)), palette.WHITE_CAP)
    wide = HALF * math.sqrt(1.04)
    body.visual(block((-wide, -wide, span[0]), (wide, wide, span[1])), band)
