"""Tin cans with a label."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette as palette
from vla_gym.assets.lite.mjcf import Extent, Vector, cylinder, new_object
from vla_gym.assets.lite.standing import StandingBody, octagon

# Half width, heights of both ends and the axis' offset, as in the frame whose z axis is up.
APOTHEM, LOW, HIGH, AXIS = 0.0312, -0.0384, 0.0376, (0.0, 0.0035)


def alphabet_soup() -> ET.Element:
    """Return a yellow can of 6.2 cm diameter and 7.6 cm height with a blue label."""
    root, element = new_object("textured", Extent(-0.04, 0.04, 0.025))
    body = StandingBody(element.element)
    body.inertial(0.02585, (1.82e-5, 1.34e-5, 1.87e-5), (0, -0.0008, -0.0027))
    _can(body, palette.SOUP, palette.SOUP_LABEL, (-0.018, 0.012))
    return root


def tomato_sauce() -> ET.Element:
    """Return a red can of the same size with a narrow green band below the lid."""
    root, element = new_object("textured", Extent(-0.06, 0.04, 0.025))
    body = StandingBody(element.element)
    body.inertial(0.02663, (1.88e-5, 1.39e-5, 1.94e-5), (0.0006, -0.0008, -0.0023))
    _can(body, palette.TOMATO, palette.TOMATO_LABEL, (0.010, 0.029))
    return root


def _can(body: StandingBody, colour: Vector, label: Vector, band: tuple[float, float]) -> None:
    body.solids(octagon(APOTHEM, LOW, HIGH, AXIS), None)
    body.visual(cylinder(APOTHEM * 1.03, LOW, HIGH - 0.002, AXIS), colour)
    body.visual(cylinder(APOTHEM * 1.05, *band, AXIS), label)
    body.visual(cylinder(APOTHEM * 0.96, HIGH - 0.002, HIGH, AXIS), palette.CAN_LID)
