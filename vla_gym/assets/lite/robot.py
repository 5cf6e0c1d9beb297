"""Low-poly visuals for robosuite's Panda, its hand and its mount.

Robosuite draws the arm with 54 meshes of 168,000 faces, which costs far more than the rest
of a frame. Here each link becomes a capsule along its bone. Only what is seen changes: collision
geometry, joints, inertias, sites and cameras stay as they are.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from vla_gym.assets.lite import palette
from vla_gym.assets.lite.mjcf import MATERIAL, Body, Shape, Vector, box, cylinder, text
from vla_gym.errors import CompileError

_ROBOT_BODY = re.compile(r"(robot|gripper|mount)\d+_")

# Bones in the frame of each link body: (body, start, end, radius, colour). The frames are those of
# the Panda's URDF; the next link's origin is where a bone ends.
_BONES: tuple[tuple[str, Vector, Vector, float, Vector], ...] = (
    ("robot0_link0", (-0.06, 0, 0.05), (0, 0, 0.05), 0.075, palette.ROBOT_LINK),
    ("robot0_link0", (0, 0, 0.05), (0, 0, 0.14), 0.062, palette.ROBOT_LINK),
    ("robot0_link1", (0, 0, -0.19), (0, 0, -0.04), 0.060, palette.ROBOT_LINK),
    ("robot0_link1", (0, -0.06, 0), (0, 0.06, 0), 0.062, palette.ROBOT_JOINT),
    ("robot0_link2", (0, -0.05, 0), (0, -0.19, 0), 0.058, palette.ROBOT_LINK),
    ("robot0_link3", (0, 0, -0.12), (0, 0, -0.03), 0.056, palette.ROBOT_LINK),
    ("robot0_link3", (0, 0, -0.02), (0.0825, 0, 0), 0.052, palette.ROBOT_LINK),
    ("robot0_link4", (0, 0, -0.05), (0, 0, 0.05), 0.056, palette.ROBOT_JOINT),
    ("robot0_link4", (0, 0, 0), (-0.0825, 0.10, 0), 0.050, palette.ROBOT_LINK),
    ("robot0_link5", (0, 0, -0.26), (0, 0.06, -0.14), 0.050, palette.ROBOT_LINK),
    ("robot0_link5", (0, 0.06, -0.14), (0, 0.03, 0), 0.046, palette.ROBOT_LINK),
    ("robot0_link6", (0, 0, -0.04), (0, 0, 0.05), 0.050, palette.ROBOT_JOINT),
    ("robot0_link6", (0.01, 0, 0), (0.088, 0, 0), 0.046, palette.ROBOT_LINK),
    ("robot0_link7", (0, 0, 0), (0, 0, 0.085), 0.044, palette.ROBOT_LINK),
)

# The fingers glow: the wrist camera sees their unlit side and their position matters most.
_MATERIAL, _FINGER_MATERIAL = "lite_robot", "lite_finger"
_MATERIALS = (
    MATERIAL | {"name": _MATERIAL, "emission": "0.25"},
    MATERIAL | {"name": _FINGER_MATERIAL, "emission": "0.6"},
)

# Tessellation of round geoms and box faces: MuJoCo's default (28, 16, 4) costs 2.5 times the time
# and looks the same at 128x128.
_QUALITY = {"numslices": "16", "numstacks": "8", "numquads": "2"}

# Solids of the hand, the fingers and the mount: (body, shape, colour). In the gripper's frame the
# fingers point along z and open along x; in a finger's frame y points away from the other finger.
_PARTS: tuple[tuple[str, Shape, Vector], ...] = (
    ("gripper0_right_gripper", box((0.100, 0.019, 0.020), (0, 0, 0.040)), palette.ROBOT_HAND),
    ("gripper0_right_gripper", cylinder(0.034, -0.022, 0.022), palette.ROBOT_HAND),
    ("gripper0_leftfinger", box((0.0105, 0.010, 0.012), (0, 0.015, 0.015)), palette.ROBOT_FINGER),
    ("gripper0_leftfinger", box((0.0095, 0.006, 0.016), (0, 0.007, 0.038)), palette.ROBOT_FINGER),
    ("gripper0_rightfinger", box((0.0105, 0.01, 0.012), (0, -0.015, 0.015)), palette.ROBOT_FINGER),
    ("gripper0_rightfinger", box((0.0095, 0.006, 0.016), (0, -0.007, 0.038)), palette.ROBOT_FINGER),
    ("mount0_pedestal", cylinder(0.17, -0.60, -0.01, (-0.02, 0)), palette.ROBOT_MOUNT),
    ("mount0_controller_box", box((0.11, 0.20, 0.265), (-0.325, 0, -0.38)), palette.ROBOT_MOUNT),
    ("mount0_pedestal_feet", box((0.385, 0.35, 0.155), (-0.1225, 0, -0.758)), palette.ROBOT_MOUNT),
)


def simplify_robot(xml: str) -> str:
    """Replace the robot's visual geoms by a few primitives on the same bodies.

    Args:
        xml: The complete MJCF text that robosuite made for a scene with one Panda, mounted on a
            pedestal or standing on what is below it.

    Returns:
        MJCF text with the same bodies, joints, inertias, collision geoms, sites and cameras in the
        same order. Meshes, materials and textures of the robot that nothing uses any more are
        gone; asset paths are left as they were. Round geoms are drawn with fewer faces.

    Raises:
        CompileError: If a body of the Panda is missing.
    """
    root = ET.fromstring(xml)
    bodies = {name: body for body in root.iter("body") if (name := body.get("name"))}
    parts = _PARTS
    if not any(name.startswith("mount0_pedestal") for name in bodies):
        parts = tuple(part for part in _PARTS if not part[0].startswith("mount0_"))
    needed = [bone[0] for bone in _BONES] + [part[0] for part in parts]
    missing = sorted(set(needed) - set(bodies))
    if missing:
        raise CompileError(
            "Expected a scene with robosuite's Panda as robot 0, but these bodies are "
            f"missing: {', '.join(missing)}. The lite visuals are made for that robot alone."
        )
    for name, body in bodies.items():
        if _ROBOT_BODY.match(name):
            for geom in [g for g in body.findall("geom") if g.get("group") == "1"]:
                body.remove(geom)
    for i, (name, start, end, radius, rgba) in enumerate(_BONES):
        _capsule(bodies[name], f"lite_{name}_bone{i}", start, end, radius, rgba)
    for i, (name, shape, rgba) in enumerate(parts):
        material = _FINGER_MATERIAL if name.endswith("finger") else _MATERIAL
        Body(bodies[name]).visual(shape, rgba, f"lite_{name}_part{i}", material)
    _drop_unused_assets(root)
    asset = _section(root, "asset")
    for attributes in _MATERIALS:
        ET.SubElement(asset, "material", attributes)
    ET.SubElement(_section(root, "visual"), "quality", _QUALITY)
    return ET.tostring(root, encoding="unicode")


def _section(root: ET.Element, tag: str) -> ET.Element:
    """Return a top-level element, added if it is missing."""
    section = root.find(tag)
    return ET.SubElement(root, tag) if section is None else section


def _capsule(
    body: ET.Element, name: str, start: Vector, end: Vector, radius: float, rgba: Vector
) -> None:
    attributes = {"name": name, "type": "capsule", "group": "1"}
    attributes |= {"contype": "0", "conaffinity": "0", "rgba": text(rgba)}
    attributes["material"] = _MATERIAL
    attributes |= {"fromto": text((*start, *end)), "size": text(radius)}
    ET.SubElement(body, "geom", attributes)


def _drop_unused_assets(root: ET.Element) -> None:
    """Remove the robot's meshes, materials and textures that no element refers to."""
    for asset in root.findall("asset"):
        # Materials go before textures, which only materials refer to.
        for tag in ("mesh", "material", "texture"):
            used = {e.get(tag) for e in root.iter() if e.get(tag)}
            for element in asset.findall(tag):
                name = element.get("name") or ""
                if _ROBOT_BODY.match(name) and name not in used:
                    asset.remove(element)
