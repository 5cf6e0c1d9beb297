"""Small helpers to write MJCF: bodies that take solids, visuals, joints and sites.

Lengths are metres, angles radians, masses kilograms, quaternions (w, x, y, z). Numbers are written
with a fixed number of digits so that the generated files are the same on every machine.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Vector = Sequence[float]
IDENTITY = (1.0, 0.0, 0.0, 0.0)

# LIBERO's contact parameters of every manipulable object: hard contacts and high friction.
CONTACT = {"solimp": "0.998 0.998 0.001", "solref": "0.001 1", "friction": "0.95 0.3 0.1"}


# Every visual uses this material. A part of its colour is emitted, so that faces turned away from
# the lamps keep their hue.
MATERIAL = {"name": "lite", "emission": "0.2", "specular": "0.1", "shininess": "0.1"}


@dataclass(frozen=True)
class Shape:
    """One primitive: MuJoCo's geom type, its half sizes, and its pose in the body frame."""

    kind: str
    size: tuple[float, ...]
    pos: tuple[float, ...] = (0.0, 0.0, 0.0)
    quat: tuple[float, ...] = IDENTITY


def text(values: Vector | float) -> str:
    """Format numbers for an XML attribute, with 6 decimals at most."""
    if isinstance(values, int | float):
        values = (values,)
    return " ".join(f"{round(float(v), 6) + 0.0:.6g}" for v in values)


def box(half: Vector, pos: Vector, quat: Vector = IDENTITY) -> Shape:
    """Return a box from half sizes, centre and rotation."""
    return Shape("box", tuple(half), tuple(pos), tuple(quat))


def block(low: Vector, high: Vector) -> Shape:
    """Return an axis-aligned box from two opposite corners."""
    half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    return box(half, [(a + b) / 2 for a, b in zip(low, high, strict=True)])


def cylinder(radius: float, low: float, high: float, xy: Vector = (0.0, 0.0)) -> Shape:
    """Return an upright cylinder between two heights."""
    return Shape("cylinder", (radius, (high - low) / 2), (xy[0], xy[1], (low + high) / 2))


def capsule(radius: float, half: float, pos: Vector, quat: Vector = IDENTITY) -> Shape:
    """Return a capsule along z from its radius, half the length of its straight part, and pose."""
    return Shape("capsule", (radius, half), tuple(pos), tuple(quat))


def ellipsoid(half: Vector, pos: Vector) -> Shape:
    """Return an axis-aligned ellipsoid from its half axes and centre."""
    return Shape("ellipsoid", tuple(half), tuple(pos))


def turn(axis: str, angle: float) -> tuple[float, float, float, float]:
    """Return the quaternion of a rotation about one coordinate axis (``"x"``, ``"y"``, ``"z"``)."""
    imaginary = [math.sin(angle / 2) if name == axis else 0.0 for name in "xyz"]
    return (math.cos(angle / 2), imaginary[0], imaginary[1], imaginary[2])


def compose(first: Vector, second: Vector) -> tuple[float, float, float, float]:
    """Return the quaternion of ``first`` followed by ``second`` in the rotated frame."""
    a, b, c, d = first
    e, f, g, h = second
    return (
        a * e - b * f - c * g - d * h,
        a * f + b * e + c * h - d * g,
        a * g - b * h + c * e + d * f,
        a * h + b * g - c * f + d * e,
    )


class Body:
    """A ``<body>`` element with methods for what LIBERO's object files contain."""

    def __init__(self, element: ET.Element) -> None:
        """Wrap an existing ``<body>`` element."""
        self.element = element

    def child(self, name: str, pos: Vector = (0, 0, 0), quat: Vector = IDENTITY) -> Body:
        """Add a child body."""
        attributes = {"name": name, "pos": text(pos)}
        if tuple(quat) != IDENTITY:
            attributes["quat"] = text(quat)
        return Body(ET.SubElement(self.element, "body", attributes))

    def inertial(self, mass: float, inertia: Vector, pos: Vector = (0, 0, 0)) -> None:
        """State mass and principal moments, so that they do not depend on the geometry."""
        attributes = {"pos": text(pos), "mass": f"{mass:.6g}"}
        attributes["diaginertia"] = " ".join(f"{v:.6g}" for v in inertia)
        ET.SubElement(self.element, "inertial", attributes)

    def _placed(self, shape: Shape) -> Shape:
        """Return a given shape as it is in the body's frame."""
        return shape

    def solid(
        self,
        shape: Shape,
        rgba: Vector | None,
        name: str | None = None,
        contact: Mapping[str, str] = CONTACT,
    ) -> None:
        """Add a shape that collides and, if a colour is given, is seen."""
        attributes = _geom(self._placed(shape)) | {"group": "0", "rgba": "0.8 0.8 0.8 0.3"}
        attributes |= contact
        if name is not None:
            attributes["name"] = name
        ET.SubElement(self.element, "geom", attributes)
        if rgba is not None:
            self.visual(shape, rgba, None if name is None else f"{name}_vis")

    def solids(self, shapes: Sequence[Shape], rgba: Vector | None) -> None:
        """Add shapes that collide and, if a colour is given, are seen."""
        for shape in shapes:
            self.solid(shape, rgba)

    def visual(
        self,
        shape: Shape,
        rgba: Vector,
        name: str | None = None,
        material: str = MATERIAL["name"],
    ) -> None:
        """Add a shape that is seen but does not collide."""
        attributes = _geom(self._placed(shape)) | {"group": "1", "contype": "0", "conaffinity": "0"}
        attributes |= {"rgba": text(rgba), "material": material}
        if name is not None:
            attributes["name"] = name
        ET.SubElement(self.element, "geom", attributes)

    def site(self, name: str, shape: Shape, rgba: Vector = (0.8, 0.8, 0.8, 0)) -> None:
        """Add a site; LIBERO's regions are invisible box sites."""
        attributes = {"name": name, "type": shape.kind, "pos": text(shape.pos)}
        attributes |= {"quat": text(shape.quat), "size": text(shape.size)}
        ET.SubElement(self.element, "site", attributes | {"group": "0", "rgba": text(rgba)})

    def joint(self, kind: str, name: str, axis: Vector, limits: Vector, damping: float) -> None:
        """Add a limited slide or hinge joint through the body's origin."""
        attributes = {"name": name, "type": kind, "pos": "0 0 0", "axis": text(axis)}
        attributes |= {"limited": "true", "range": text(limits), "damping": text(damping)}
        ET.SubElement(self.element, "joint", attributes)


@dataclass(frozen=True)
class Extent:
    """LIBERO's marker sites, which its placement sampler reads.

    Attributes:
        bottom: Height of ``bottom_site`` below the origin (negative).
        top: Height of ``top_site``.
        radius: x and y of ``horizontal_radius_site``.
        marker: Radius of the marker spheres.
    """

    bottom: float
    top: float
    radius: float
    marker: float = 0.005


def new_object(model: str, extent: Extent, pos: Vector = (0, 0, 0)) -> tuple[ET.Element, Body]:
    """Start an object file as robosuite expects it.

    Args:
        model: Name of the model element.
        extent: LIBERO's marker sites.
        pos: Position of the body before anything places it.

    Returns:
        The ``<mujoco>`` element and the body ``object``, which becomes the object's main body.
    """
    root = ET.Element("mujoco", {"model": model})
    ET.SubElement(ET.SubElement(root, "asset"), "material", MATERIAL)
    outer = ET.SubElement(ET.SubElement(root, "worldbody"), "body")
    body = ET.SubElement(outer, "body", {"name": "object", "pos": text(pos)})
    markers = {
        "bottom_site": (0, 0, extent.bottom),
        "top_site": (0, 0, extent.top),
        "horizontal_radius_site": (extent.radius, extent.radius, 0),
    }
    for name, pos in markers.items():
        attributes = {"name": name, "pos": text(pos), "size": text(extent.marker)}
        ET.SubElement(outer, "site", attributes | {"rgba": "0 0 0 0"})
    return root, Body(body)


def to_text(root: ET.Element) -> str:
    """Return indented XML that ends with a newline."""
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _geom(shape: Shape) -> dict[str, str]:
    attributes = {"type": shape.kind, "size": text(shape.size), "pos": text(shape.pos)}
    if tuple(shape.quat) != IDENTITY:
        attributes["quat"] = text(shape.quat)
    return attributes
