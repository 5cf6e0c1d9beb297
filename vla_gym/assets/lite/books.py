"""Books that stand on their lower edge, thin enough for the gripper."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from vla_gym.assets.lite import object_palette as palette
from vla_gym.assets.lite.mjcf import Body, Extent, Vector, block, box, new_object

COVER = 0.0030


def black_book() -> ET.Element:
    """Return a black book, 2.9 cm thick and 13.4 cm tall, whose spine faces +y."""
    root, body = new_object("black_book", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.04255, (1.07e-4, 6.70e-5, 4.61e-5), (-0.0005, -0.0122, 0.0694))
    half, centre = (0.0144, 0.0552, 0.0672), (-0.0005, -0.0122, 0.0694)
    _book(body, half, centre, palette.BLACK_BOOK)
    return root


def yellow_book() -> ET.Element:
    """Return a yellow book, 2.4 cm thick and 12.2 cm tall, whose spine faces +y."""
    root, body = new_object("yellow_book", Extent(-0.06, 0.04, 0.025))
    body.inertial(0.02812, (5.74e-5, 3.63e-5, 2.37e-5), (0.0016, 0.0001, 0.0631))
    _book(body, (0.0118, 0.0489, 0.0611), (0.0016, 0.0001, 0.0631), palette.YELLOW_BOOK)
    return root


def _book(body: Body, half: Vector, centre: Vector, colour: Vector) -> None:
    """Add one solid box; seen are two covers, the spine and the pages set back between them."""
    body.solid(box(half, centre), None)
    low = [c - h for c, h in zip(centre, half, strict=True)]
    high = [c + h for c, h in zip(centre, half, strict=True)]
    body.visual(block(low, (low[0] + COVER, high[1], high[2])), colour)
    body.visual(block((high[0] - COVER, low[1], low[2]), high), colour)
    body.visual(block((low[0], high[1] - COVER, low[2]), high), colour)
    inset = 0.003
    pages = block(
        (low[0] + COVER, low[1] + inset, low[2] + inset),
        (high[0] - COVER, high[1] - COVER, high[2] - inset),
    )
    body.visual(pages, palette.PAGES)
