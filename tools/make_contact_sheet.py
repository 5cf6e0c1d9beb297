"""Draw docs/lite_objects.png: every object of the lite pack alone, with its name.

Usage: python tools/make_contact_sheet.py [OUT.png]

Each picture is framed to its object, so sizes do not compare between pictures.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")

import mujoco
import numpy as np
from PIL import Image, ImageDraw

from vla_gym.assets.lite import objects
from vla_gym.assets.lite.generate import GENERATORS
from vla_gym.assets.lite.mjcf import text, to_text, turn

SIZE, LABEL, COLUMNS = 172, 16, 8
AZIMUTH, ELEVATION = 125, -32
TURNED = {"moka_pot": 305}  # from the side of its handle
FOLDERS = ("stable_scanned_objects", "stable_hope_objects", "turbosquid_objects")
FOLDERS += ("articulated_objects",)


def make_model(path: str) -> mujoco.MjModel:
    """Compile one object, standing, on a pale plane just below its lowest visual."""
    root = GENERATORS[path]()
    body = root.find("worldbody/body/body[@name='object']")
    if Path(path).stem in objects.Y_UP:
        body.set("quat", text(turn("x", np.pi / 2)))
    world = root.find("worldbody")
    light = {"pos": "0.5 -0.5 2", "dir": "-0.25 0.25 -1", "directional": "true"}
    ET.SubElement(world, "light", light | {"castshadow": "false"})
    low = bounds(mujoco.MjModel.from_xml_string(to_text(root)))[0][2]
    floor = {"type": "plane", "size": "5 5 0.1", "pos": f"0 0 {low:.5f}", "group": "2"}
    ET.SubElement(world, "geom", floor | {"rgba": "0.62 0.70 0.66 1"})
    return mujoco.MjModel.from_xml_string(to_text(root))


def bounds(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of the box around all visuals, in world coordinates."""
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    visual = model.geom_group == 1
    half = np.einsum(
        "nij,nj->ni", np.abs(data.geom_xmat[visual].reshape(-1, 3, 3)), model.geom_aabb[visual, 3:]
    )
    centre = data.geom_xpos[visual]
    return (centre - half).min(axis=0), (centre + half).max(axis=0)


def draw(path: str) -> Image.Image:
    """Return one labelled picture."""
    model = make_model(path)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    low, high = bounds(model)
    camera, options = mujoco.MjvCamera(), mujoco.MjvOption()
    camera.lookat[:] = (low + high) / 2
    camera.distance = 1.45 * float(np.linalg.norm(high - low))
    camera.azimuth, camera.elevation = TURNED.get(Path(path).stem, AZIMUTH), ELEVATION
    options.geomgroup[:] = (0, 1, 1, 0, 0, 0)
    options.sitegroup[:] = 0
    with mujoco.Renderer(model, SIZE, SIZE) as renderer:
        renderer.update_scene(data, camera, options)
        picture = Image.fromarray(renderer.render())
    cell = Image.new("RGB", (SIZE, SIZE + LABEL), "white")
    cell.paste(picture, (0, LABEL))
    ImageDraw.Draw(cell).text((3, 2), Path(path).stem, fill="black")
    return cell


def main(out: Path) -> None:
    """Write the grid to ``out``."""
    cells = [draw(path) for path in GENERATORS if path.startswith(FOLDERS)]
    rows = -(-len(cells) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * SIZE, rows * (SIZE + LABEL)), "white")
    for i, cell in enumerate(cells):
        sheet.paste(cell, (i % COLUMNS * SIZE, i // COLUMNS * (SIZE + LABEL)))
    sheet.save(out, optimize=True)


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "docs" / "lite_objects.png"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
