"""Cabinets with three sliding drawers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Body, Extent, Vector, block, box, new_object, turn

# Region boxes of LIBERO are turned by a quarter about y: their first half size is the height.
REGION_TURN = turn("y", math.pi / 2)


@dataclass(frozen=True)
class Drawer:
    """One drawer of a cabinet whose front faces -y.

    Attributes:
        level: ``"top"``, ``"middle"`` or ``"bottom"``; names the body, the joint and the region.
        handle: Height of the handle's bar, in metres above the cabinet's origin.
        floor: Height of the drawer floor's middle plane.
        middle: Height of the middle of its walls.
        region: Height of LIBERO's region box.
    """

    level: str
    handle: float
    floor: float
    middle: float
    region: float


DRAWERS = (
    Drawer("top", 0.18393, 0.15514, 0.1836, 0.18563),
    Drawer("middle", 0.11041, 0.08543, 0.1139, 0.11690),
    Drawer("bottom", 0.04114, 0.01682, 0.0453, 0.04701),
)


@dataclass(frozen=True)
class Finish:
    """The colours of a cabinet: walls, lid, drawer fronts (from the top), drawers, handles."""

    shell: Vector
    lid: Vector
    fronts: tuple[Vector, ...]
    inside: Vector
    handle: Vector


WOOD = Finish(
    palette.CABINET,
    palette.CABINET_TOP,
    palette.DRAWER_FRONTS,
    palette.DRAWER_INSIDE,
    palette.HANDLE,
)
WHITE = Finish(
    palette.WHITE_CABINET,
    palette.WHITE_CABINET_TOP,
    palette.WHITE_DRAWER_FRONTS,
    palette.WHITE_DRAWER_INSIDE,
    palette.DARK_HANDLE,
)

# Shell: x range, y range and heights of its floor, shelves and top, in metres.
LEFT, RIGHT = -0.1174, 0.1242
FRONT, BACK = -0.0792, 0.1117
SHELVES = (0.0070, 0.0793, 0.1494)
TOP = 0.2222
WALL = 0.0103
# Drawers keep a millimetre from the shell, since both collide.
DRAWER_LEFT, DRAWER_RIGHT = -0.1043, 0.1113
DRAWER_FRONT, DRAWER_BACK = -0.0720, 0.0940


def wooden_cabinet() -> ET.Element:
    """Return the brown cabinet of libero_goal, libero_spatial and some kitchens."""
    return _cabinet("wooden_cabinet", WOOD)


def white_cabinet() -> ET.Element:
    """Return the white cabinet of other kitchens: LIBERO's two differ in their looks alone."""
    return _cabinet("white_cabinet", WHITE)


def _cabinet(model: str, finish: Finish) -> ET.Element:
    """Return a cabinet: shell, three drawers with bar handles, ``top_side`` and regions."""
    root, body = new_object(model, Extent(-0.045, 0.045, 0.045, 0.05))
    base = body.child("base")
    base.inertial(0.17624, (0.0025, 0.0022, 0.0016), (0.0035, 0.0383, 0.1078))
    base.site("top_side", box((0.12534, 0.09438, 0.00147), (0.00354, 0.01567, 0.22152)))
    _shell(base, finish)
    for drawer, front in zip(DRAWERS, finish.fronts, strict=True):
        _drawer(base.child(f"cabinet_{drawer.level}"), drawer, front, finish)
    return root


def _shell(base: Body, finish: Finish) -> None:
    base.solid(block((LEFT, FRONT, 0.0045), (LEFT + WALL, BACK, TOP - 0.002)), finish.shell)
    base.solid(block((RIGHT - WALL, FRONT, 0.0045), (RIGHT, BACK, TOP - 0.002)), finish.shell)
    base.solid(block((LEFT, BACK - 0.0045, 0.0045), (RIGHT, BACK, TOP - 0.002)), finish.shell)
    base.solid(block((LEFT, FRONT, 0.0045), (RIGHT, BACK, 0.0100)), finish.shell)
    lid = block((LEFT - 0.006, FRONT - 0.0005, TOP - 0.002), (RIGHT + 0.006, BACK, TOP + 0.0008))
    base.solid(lid, finish.lid)
    for height in SHELVES[1:]:
        # The shelves end behind the drawer faces, which reach a little past their heights.
        shelf = block((LEFT, FRONT + 0.0165, height - 0.0008), (RIGHT, BACK, height + 0.0008))
        base.solid(shelf, None)


def _drawer(body: Body, drawer: Drawer, front: Vector, finish: Finish) -> None:
    # The moment of inertia is LIBERO's; a slide joint does not feel it.
    body.inertial(3.0, (1.0, 1.0, 1.0))
    body.joint("slide", f"{drawer.level}_level", (0, 1, 0), (-0.16, 0.01), 50.0)
    region = box((0.02993, 0.07561, 0.10224), (0.00328, 0.01128, drawer.region), REGION_TURN)
    body.site(f"{drawer.level}_region", region)
    low, high = drawer.floor - 0.004, drawer.middle + 0.0317
    inner = finish.inside
    half = (DRAWER_RIGHT - DRAWER_LEFT) / 2 + 0.0017
    middle = (DRAWER_RIGHT + DRAWER_LEFT) / 2
    face = block(
        (middle - half, FRONT + 0.0012, drawer.middle - 0.0345),
        (middle + half, DRAWER_FRONT + 0.0070, drawer.middle + 0.0335),
    )
    body.solid(face, front)
    body.solid(
        block((DRAWER_LEFT, DRAWER_BACK - 0.007, low), (DRAWER_RIGHT, DRAWER_BACK, high)), inner
    )
    for side in (DRAWER_LEFT, DRAWER_RIGHT - 0.0048):
        body.solid(block((side, DRAWER_FRONT, low), (side + 0.0048, DRAWER_BACK, high)), inner)
    body.solid(
        block((DRAWER_LEFT, DRAWER_FRONT, low), (DRAWER_RIGHT, DRAWER_BACK, drawer.floor + 0.004)),
        inner,
    )
    _handle(body, drawer.handle, finish.handle)


def _handle(body: Body, height: float, rgba: Vector) -> None:
    """Add a bar 9 cm long and 1.5 cm thick, with a gap of 1.6 cm behind it for a finger."""
    body.solid(box((0.04445, 0.0082, 0.0077), (-0.0028, -0.1016, height)), rgba)
    for x in (-0.0356, 0.0292):
        body.solid(box((0.0051, 0.0106, 0.0055), (x, -0.0835, height)), rgba)
