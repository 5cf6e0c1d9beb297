"""Mugs: hollow to the gripper, so that a finger fits inside the rim; a handle on one side.

To the eye they are closed below the rim by a dark disc: one shape instead of a ring of eight.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette as palette
from vla_gym.assets.lite.mjcf import (
    Body,
    Extent,
    Shape,
    Vector,
    block,
    box,
    cylinder,
    ellipsoid,
    new_object,
    turn,
)
from vla_gym.assets.lite.rings import Tier, ring

SIDES = 8


def porcelain_mug() -> ET.Element:
    """Return a white mug with a round belly, 9.3 cm wide and 10.6 cm tall, handle towards -x."""
    root, body = new_object("porcelain_mug", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.01646, (2.80e-5, 3.41e-5, 2.81e-5), (0.0102, -0.0010, 0.0546))
    axis, low, top = (0.0143, -0.0016), 0.0024, 0.1085
    body.solids(ring(Tier(SIDES, (0.0441, 0.0420), (0.0441, top), 0.0048), axis), None)
    body.solids(ring(Tier(SIDES, (0.0270, 0.0060), (0.0441, 0.0430), 0.0030), axis), None)
    _floor(body, axis, 0.0262, low, 0.0128)
    body.visual(cylinder(0.0465, 0.044, top, axis), palette.PORCELAIN)
    body.visual(ellipsoid((0.0465, 0.0465, 0.0415), (*axis, 0.044)), palette.PORCELAIN)
    body.visual(cylinder(0.0262, low, 0.012, axis), palette.PORCELAIN)
    _inside(body, axis, 0.0415, top, palette.PORCELAIN_INSIDE)
    handle = [
        box((0.0038, 0.0080, 0.0198), (-0.0595, 0, 0.0560)),
        _bar((-0.0583, 0.0400), (-0.0250, 0.0200), 0.0080, 0.0038),
        _bar((-0.0600, 0.0740), (-0.0300, 0.0930), 0.0080, 0.0038),
    ]
    body.solids(handle, palette.PORCELAIN)
    return root


def red_coffee_mug() -> ET.Element:
    """Return a tall red mug that widens from 5.8 to 9.1 cm, 13.3 cm tall, handle towards +x."""
    root, body = new_object("red_coffee_mug", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.02935, (6.04e-5, 6.29e-5, 3.44e-5), (-0.0152, -0.0028, 0.0624))
    axis, low, top = (-0.0153, -0.0030), -0.0018, 0.1308
    body.solids(
        ring(Tier(SIDES, (0.0255, low + 0.0004), (0.0420, top - 0.0004), 0.0070), axis), None
    )
    _floor(body, axis, 0.0260, low, 0.0078)
    for radius, bottom in ((0.0320, low), (0.0370, 0.040), (0.0425, 0.085)):
        body.visual(cylinder(radius, bottom, top, axis), palette.RED_MUG)
    _inside(body, axis, 0.0375, top, palette.RED_MUG_INSIDE)
    handle = [
        box((0.0029, 0.0072, 0.0192), (0.0547, 0.0011, 0.0944)),
        _bar((0.0150, 0.0270), (0.0570, 0.0770), 0.0072, 0.0029, 0.0011),
        _bar((0.0200, 0.1135), (0.0570, 0.1115), 0.0072, 0.0029, 0.0011),
    ]
    body.solids(handle, palette.RED_MUG)
    return root


def white_yellow_mug() -> ET.Element:
    """Return a wide mug, white above and yellow below and inside, handle towards +x."""
    root, body = new_object("white_yellow_mug", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.03091, (5.09e-5, 6.10e-5, 5.87e-5), (-0.0137, 0.0005, 0.0510))
    axis, low, top = (-0.0182, 0.0), 0.0001, 0.1031
    body.solids(ring(Tier(SIDES, (0.0380, 0.0170), (0.0468, 0.1026), 0.0082), axis), None)
    body.solids(ring(Tier(SIDES, (0.0250, 0.0055), (0.0380, 0.0195), 0.0080), axis), None)
    _floor(body, axis, 0.0262, low, 0.0052)
    body.visual(cylinder(0.0500, 0.060, top, axis), palette.PORCELAIN)
    body.visual(cylinder(0.0470, 0.022, 0.061, axis), palette.YELLOW_MUG)
    body.visual(ellipsoid((0.0470, 0.0470, 0.0219), (*axis, 0.022)), palette.YELLOW_MUG)
    _inside(body, axis, 0.0440, top, palette.YELLOW_MUG_INSIDE)
    handle = [
        box((0.0041, 0.0088, 0.0292), (0.0641, 0, 0.0560)),
        _bar((0.0180, 0.0230), (0.0650, 0.0310), 0.0088, 0.0041),
        _bar((0.0270, 0.0800), (0.0650, 0.0800), 0.0088, 0.0041),
    ]
    body.solids(handle, palette.YELLOW_MUG)
    return root


def _floor(body: Body, axis: Vector, half: float, low: float, high: float) -> None:
    # A square's corners reach as far out as the round foot of a radius 1.2 times its half side.
    half /= 1.2
    corners = [(axis[0] + s * half, axis[1] + s * half, z) for s, z in ((-1, low), (1, high))]
    body.solid(block(*corners), None)


def _inside(body: Body, axis: Vector, radius: float, top: float, rgba: Vector) -> None:
    body.visual(cylinder(radius, top - 0.0005, top + 0.0004, axis), rgba)


def _bar(start: Vector, end: Vector, width: float, thickness: float, y: float = 0.0) -> Shape:
    """Return a bar between two points (x, z); width and thickness are half sizes."""
    dx, dz = end[0] - start[0], end[1] - start[1]
    centre = ((start[0] + end[0]) / 2, y, (start[1] + end[1]) / 2)
    half = (math.hypot(dx, dz) / 2, width, thickness)
    return box(half, centre, turn("y", -math.atan2(dz, dx)))
