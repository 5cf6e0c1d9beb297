"""Arenas: what they share, and the table-top scene of LIBERO's TableArena class."""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ET

from PIL import Image

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import MATERIAL, Vector, text

# The arena class looks for these texture elements and puts a file name of its style table there;
# different releases of the libero package name different files.
FLOOR_TEXTURES = ("light-gray-floor-tile.png", "tile_grigia_caldera_porcelain_floor.png")
WALL_TEXTURES = ("light-gray-plaster.png", "smooth_light_gray_plaster.png")
# Textures of the other rooms' styles.
STYLE_TEXTURES = {
    "gray_ceramic_tile.png": palette.CERAMIC_FLOOR,
    "seamless_wood_planks_floor.png": palette.PLANK_FLOOR,
    "yellow_linen_wall_texture.png": palette.LINEN_WALL,
}

TABLE_MATERIAL = "table_texture"

CAMERAS = {
    "frontview": ((1.0, 0, 1.45), (0.56, 0.43, 0.43, 0.56)),
    "birdview": ((-0.2, 0, 3.0), (0.7071, 0, 0, 0.7071)),
    "agentview": ((0.5, 0, 1.35), (0.653, 0.271, 0.271, 0.653)),
    "sideview": (
        (-0.05651774593317116, 1.2761224129427358, 1.4879572214102434),
        (0.009905065491771751, 0.006877963156909582, 0.5912228352893879, 0.806418094001364),
    ),
}


def textures() -> dict[str, bytes]:
    """Return the texture files by path relative to the pack's root."""
    files = dict.fromkeys(FLOOR_TEXTURES, _flat_png(palette.FLOOR))
    files |= dict.fromkeys(WALL_TEXTURES, _flat_png(palette.WALL))
    files |= {name: _flat_png(rgba) for name, rgba in STYLE_TEXTURES.items()}
    return {f"textures/{name}": data for name, data in files.items()}


def libero_tabletop_base_style() -> ET.Element:
    """Return the room and the table; the arena class sets the table's size and height."""
    root, world = new_arena("table_arena")
    add_floor(world)
    add_walls(world)
    add_table(world, palette.TABLE)
    add_lights_and_cameras(world)
    return root


def new_arena(model: str) -> tuple[ET.Element, ET.Element]:
    """Return the ``<mujoco>`` element with sky, textures and materials, and its world."""
    root = ET.Element("mujoco", {"model": model})
    asset = ET.SubElement(root, "asset")
    sky = {"type": "skybox", "builtin": "gradient", "width": "64", "height": "64"}
    ET.SubElement(asset, "texture", sky | {"rgb1": ".9 .9 1", "rgb2": ".2 .3 .4"})
    for texture, material, file in (
        ("texplane", "floorplane", FLOOR_TEXTURES[-1]),
        ("tex-wall", "walls_mat", WALL_TEXTURES[-1]),
    ):
        attributes = {"name": texture, "type": "2d", "file": f"../textures/{file}"}
        ET.SubElement(asset, "texture", attributes)
        ET.SubElement(asset, "material", {"name": material, "texture": texture, "specular": "0"})
    ET.SubElement(asset, "material", MATERIAL | {"name": TABLE_MATERIAL})
    return root, ET.SubElement(root, "worldbody")


def add_floor(world: ET.Element) -> None:
    """Add the floor to the world or to a body."""
    floor = {"name": "floor", "type": "plane", "size": "3 3 .125", "pos": "0 0 0"}
    ET.SubElement(world, "geom", floor | {"condim": "3", "group": "1", "material": "floorplane"})


def add_walls(world: ET.Element) -> None:
    """Add three visual walls: behind the robot and on both sides."""
    walls: dict[str, tuple[Vector, Vector]] = {
        "wall_rear_visual": ((0.01, 3.0, 1.5), (-2.0, 0, 1.5)),
        "wall_left_visual": ((2.5, 0.01, 1.5), (0.5, 3.0, 1.5)),
        "wall_right_visual": ((2.5, 0.01, 1.5), (0.5, -3.0, 1.5)),
    }
    for name, (size, pos) in walls.items():
        attributes = {"name": name, "type": "box", "size": text(size), "pos": text(pos)}
        attributes |= {"group": "1", "contype": "0", "conaffinity": "0", "material": "walls_mat"}
        ET.SubElement(world, "geom", attributes)


def add_table(world: ET.Element, rgba: Vector) -> None:
    """Add the table whose size and height the arena class sets."""
    table = ET.SubElement(world, "body", {"name": "table", "pos": "0 0 0.4"})
    top = {"type": "box", "pos": "0 0 0", "size": "0.4 0.4 0.4"}
    solid = {"name": "table_collision", "group": "0", "friction": "1 0.005 0.0001"}
    ET.SubElement(table, "geom", top | solid)
    seen = {"group": "1", "contype": "0", "conaffinity": "0", "material": TABLE_MATERIAL}
    attributes = top | seen | {"name": "table_visual", "rgba": text(rgba)}
    ET.SubElement(table, "geom", attributes)
    marker = {"name": "table_top", "pos": "0 0 0.4", "size": "0.001 0.001 0.001"}
    ET.SubElement(table, "site", marker | {"rgba": "0 0 0 0"})
    for i in range(1, 5):
        leg = {"name": f"table_leg{i}_visual", "type": "cylinder", "size": "0.05 0.1"}
        ET.SubElement(table, "geom", leg | seen | {"rgba": text(palette.TABLE_LEG)})


def add_lights_and_cameras(world: ET.Element) -> None:
    """Add two lamps and LIBERO's cameras; its problem classes move and add cameras."""
    for name, where in (("light1", "1 1 4"), ("light2", "-3 -3 4")):
        light = {"name": name, "pos": where, "dir": "0 -.15 -1", "directional": "false"}
        light |= {"diffuse": ".8 .8 .8", "specular": ".3 .3 .3", "castshadow": "false"}
        ET.SubElement(world, "light", light)
    for name, (pos, quat) in CAMERAS.items():
        norm = math.sqrt(sum(v * v for v in quat))
        attributes = {"name": name, "mode": "fixed", "pos": text(pos)}
        attributes["quat"] = text([v / norm for v in quat])
        ET.SubElement(world, "camera", attributes)


def _flat_png(rgba: Vector) -> bytes:
    """Return a one-colour RGB image as the bytes of a PNG file."""
    file, colour = io.BytesIO(), tuple(round(255 * value) for value in rgba[:3])
    Image.new("RGB", (4, 4), colour).save(file, "PNG")
    return file.getvalue()
