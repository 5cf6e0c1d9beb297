"""Sauce and dressing bottles: flat, with a shoulder and a screw cap."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette as palette
from vla_gym.assets.lite.mjcf import Body, Extent, Vector, block, cylinder, ellipsoid, new_object
from vla_gym.assets.lite.standing import StandingBody, octagon


def bbq_sauce() -> ET.Element:
    """Return a small brown bottle, 4.7 x 2.9 cm wide and 10.7 cm tall, with an orange label."""
    root, body = new_object("textured", Extent(-0.06, 0.06, 0.015))
    body.inertial(0.01218, (1.12e-5, 1.21e-5, 2.6e-6), (0, 0, -0.0076))
    low, shoulder, neck, top = -0.0546, -0.0010, 0.0262, 0.0525
    body.solid(block((-0.0235, -0.0145, low), (0.0235, 0.0145, shoulder)), palette.BBQ)
    body.solid(block((-0.0181, -0.0143, shoulder), (0.0181, 0.0143, neck)), None)
    body.solid(block((-0.0134, -0.0134, neck), (0.0134, 0.0134, top)), None)
    body.visual(ellipsoid((0.0235, 0.0145, 0.036), (0, 0, shoulder)), palette.BBQ)
    body.visual(cylinder(0.0130, 0.024, top), palette.BBQ_CAP)
    body.visual(block((-0.0240, -0.0150, -0.045), (0.0240, 0.0150, -0.010)), palette.BBQ_LABEL)
    return root


def ketchup() -> ET.Element:
    """Return a bright red bottle, 5.6 x 3.4 cm wide and 14.6 cm tall, with a white cap."""
    root, element = new_object("textured", Extent(-0.06, 0.04, 0.025))
    body = StandingBody(element.element)
    body.inertial(0.02322, (3.79e-5, 6.99e-6, 4.03e-5), (0.0004, -0.009, 0.0008))
    low, shoulder, neck, top = -0.0724, -0.0063, 0.0364, 0.0732
    body.solid(block((-0.0277, -0.0177, low), (0.0285, 0.0161, shoulder)), palette.KETCHUP)
    body.solid(block((-0.0235, -0.0191, shoulder), (0.0243, 0.0175, 0.0146)), None)
    body.solid(block((-0.0183, -0.0191, 0.0146), (0.0191, 0.0175, neck)), None)
    body.solids(octagon(0.0166, neck, top, (0.0004, -0.0008)), None)
    body.visual(ellipsoid((0.0281, 0.0176, 0.052), (0.0004, -0.0008, shoulder)), palette.KETCHUP)
    body.visual(cylinder(0.0168, neck, top, (0.0004, -0.0008)), palette.WHITE_CAP)
    label = block((-0.0283, -0.0183, -0.050), (0.0291, 0.0167, -0.020))
    body.visual(label, palette.WHITE_LABEL)
    return root


def salad_dressing() -> ET.Element:
    """Return a pale bottle with a dark green cap, 5.3 cm wide and 14.6 cm tall."""
    root, element = new_object("textured", Extent(-0.06, 0.04, 0.025))
    _dressing(element, palette.DRESSING_LABEL)
    return root


def new_salad_dressing() -> ET.Element:
    """Return the same bottle with a yellow label, 5 cm from the object's origin along y.

    LIBERO's file has this offset (and the body's misspelt name): its origin is near the ground.
    """
    root, element = new_object("textured", Extent(-0.06, 0.04, 0.025))
    _dressing(element.child("sald_dressing_body", (0, 0.05, 0)), palette.NEW_DRESSING_LABEL)
    return root


def _dressing(parent: Body, label: Vector) -> None:
    body = StandingBody(parent.element)
    body.inertial(0.02178, (3.40e-5, 5.19e-6, 3.52e-5), (-0.0005, -0.0056, 0.0002))
    x, low, top = -0.001, -0.0727, 0.0728
    # Half widths and heights of the levels below the cap; all are 3.5 cm deep but the neck.
    levels = ((0.0173, low, -0.0628), (0.0222, -0.0628, -0.0520), (0.0264, -0.0520, -0.0102))
    for half, bottom, ceiling in (*levels, (0.0229, -0.0102, 0.0020), (0.0171, 0.0020, 0.0128)):
        body.solid(block((x - half, -0.0175, bottom), (x + half, 0.0171, ceiling)), None)
    body.solid(block((-0.0124, -0.0149, 0.0128), (0.0134, 0.0149, 0.0358)), None)
    body.solids(octagon(0.0166, 0.0356, top, (0.0003, 0)), None)
    body.visual(ellipsoid((0.0270, 0.0176, 0.050), (x, 0, -0.0300)), palette.DRESSING)
    body.visual(cylinder(0.0172, low, -0.055, (x, 0)), palette.DRESSING)
    body.visual(cylinder(0.0135, -0.01, 0.036, (x, 0)), palette.DRESSING)
    body.visual(cylinder(0.0168, 0.0330, top, (0.0003, 0)), palette.DRESSING_CAP)
    body.visual(block((x - 0.0170, -0.0180, -0.047), (x + 0.0170, 0.0180, -0.013)), label)
