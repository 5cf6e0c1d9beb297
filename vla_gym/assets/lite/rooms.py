"""The arenas beside the plain table top: kitchen, living room, study and bare floor.

Behind the robot stand a few boxes, so that the rooms differ in the images.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import Body, Shape, Vector, block, cylinder, turn
from vla_gym.assets.lite.scenes import (
    TABLE_MATERIAL,
    add_floor,
    add_lights_and_cameras,
    add_table,
    add_walls,
    new_arena,
)


def libero_kitchen_tabletop_base_style() -> ET.Element:
    """Return the kitchen; the arena class sets the table's size and height.

    LIBERO's third lamp is left out: it would only wash out colours that need no third lamp.
    """
    root, world = new_arena("table_arena")
    add_floor(world)
    add_walls(world)
    backdrop = Body(world)
    _seen(backdrop, block((-1.99, -1.7, 0), (-1.45, 1.7, 0.86)), palette.COUNTER)
    _seen(backdrop, block((-1.99, -1.72, 0.86), (-1.42, 1.72, 0.90)), palette.COUNTER_TOP)
    _seen(backdrop, block((-1.97, -2.83, 0), (-1.53, -1.97, 1.77)), palette.STEEL)
    _seen(backdrop, cylinder(0.11, 0.90, 1.05, (-1.55, 0.26)), palette.COUNTER_TOP)
    add_table(world, palette.KITCHEN_TABLE)
    add_lights_and_cameras(world)
    return root


def libero_living_room_tabletop_base_style() -> ET.Element:
    """Return the living room: a low table, on which the robot stands as well."""
    root, world = new_arena("living_room_arena")
    add_floor(ET.SubElement(world, "body", {"name": "floor", "pos": "0 0 0"}))
    table = Body(world).child("living_room_table")
    # LIBERO's frame of the board: its x axis is the world's y.
    table = table.child("living_room_table_col", (-0.25, 0.25, 0), turn("z", math.pi / 2))
    table.inertial(34.5394, (2.79, 3.72, 5.27), (-0.0267, -0.0002, 0.2336))
    low, high = 0.4131, 0.4368
    for shape in (
        block((-0.8693, -0.5887, low), (0.4741, 0.5742, high)),
        block((0.4741, -0.4168, low), (0.6507, 0.4168, high)),
        block((-1.0714, -0.4168, low), (-0.8693, 0.4168, high)),
    ):
        table.solid(shape, None)
        _seen(table, shape, palette.LIVING_ROOM_TABLE)
    foot = block((-0.4352, -0.4116, 0), (0.4352, 0.4116, low))
    table.solid(foot, None)
    _seen(table, foot, palette.TABLE_LEG)
    add_walls(world)
    backdrop = Body(world)
    _seen(backdrop, block((-1.99, -1.3, 0), (-1.55, 1.3, 0.45)), palette.WALL_UNIT)
    _seen(backdrop, block((-1.99, 0.15, 0.96), (-1.95, 1.01, 1.97)), palette.PAINTING)
    add_lights_and_cameras(world)
    return root


def libero_study_base_style() -> ET.Element:
    """Return the study: a desk of 1.4 x 2.8 m, 88.5 cm high."""
    root, world = new_arena("table_arena")
    add_floor(world)
    desk = Body(world).child("study_table")
    desk.inertial(29.6281, (19.69, 5.60, 23.59), (0, 0, 0.8068))
    top = block((-0.6895, -1.3927, 0.8135), (0.6895, 1.3927, 0.8851))
    desk.solid(top, None)
    _seen(desk, top, palette.STUDY_TABLE)
    for y in (-0.69, 0.71):
        frame = block((-0.5205, y - 0.05, 0.0002), (0.5162, y + 0.05, 0.0468))
        desk.solid(frame, None)
        for x in (-0.5005, 0.4962):
            leg = block((x - 0.02, y - 0.05, 0.0468), (x + 0.02, y + 0.05, 0.7884))
            desk.solid(leg, None)
            _seen(desk, leg, palette.TABLE_LEG)
    add_walls(world)
    backdrop = Body(world)
    _seen(backdrop, block((-1.87, -1.60, 0), (-1.56, -0.38, 1.79)), palette.BOOK_SHELF)
    _seen(backdrop, block((-1.95, 0.005, 1.0), (-1.91, 0.984, 1.98)), palette.PAINTING)
    _seen(backdrop, cylinder(0.25, 0.25, 1.2, (-1.82, 0.56)), palette.LEAVES)
    _seen(backdrop, cylinder(0.15, 0, 0.25, (-1.82, 0.56)), palette.COUNTER_TOP)
    add_lights_and_cameras(world)
    return root


def libero_floor_base_style() -> ET.Element:
    """Return the room without a table: the objects lie on the floor."""
    root, world = new_arena("table_arena")
    add_floor(ET.SubElement(world, "body", {"name": "floor", "pos": "0 0 0"}))
    add_walls(world)
    add_lights_and_cameras(world)
    return root


def _seen(body: Body, shape: Shape, rgba: Vector) -> None:
    body.visual(shape, rgba, material=TABLE_MATERIAL)
