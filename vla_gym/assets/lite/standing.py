"""Shapes that several families share: octagonal columns and bodies whose own y axis is up."""

from __future__ import annotations

import math

from vla_gym.assets.lite.mjcf import Body, Shape, Vector, box, compose, turn

# From a frame whose z axis is up into a body frame whose y axis is.
_TO_Y_UP = turn("x", -math.pi / 2)


def octagon(apothem: float, low: float, high: float, xy: Vector = (0.0, 0.0)) -> list[Shape]:
    """Return four boxes that make an upright octagonal column.

    Boxes collide faster and rest steadier than a cylinder does.

    Args:
        apothem: Distance from the axis to each of the eight faces, in metres.
        low: Height of its underside.
        high: Height of its top.
        xy: Position of its axis.
    """
    half = (apothem, apothem * math.tan(math.pi / 8), (high - low) / 2)
    centre = (xy[0], xy[1], (low + high) / 2)
    return [box(half, centre, turn("z", i * math.pi / 4)) for i in range(4)]


class StandingBody(Body):
    """A body whose y axis points up when it stands, as in some of LIBERO's files.

    Solids and visuals are given as if z were up and x the same; inertia is the body's own.
    """

    def _placed(self, shape: Shape) -> Shape:
        x, y, z = shape.pos
        return Shape(shape.kind, shape.size, (x, z, -y), compose(_TO_Y_UP, shape.quat))
