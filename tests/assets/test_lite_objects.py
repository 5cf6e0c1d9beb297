"""The lite pack's movable objects: LIBERO's classes load them, they rest as the real ones do."""

from __future__ import annotations

import functools
import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from run_python import run_python

from vla_gym.assets import resolve_asset_pack
from vla_gym.assets.lite.generate import GENERATORS
from vla_gym.assets.lite.mjcf import to_text
from vla_gym.suites import SUITES, suite_tasks

STANDING = {
    "wine_rack",
    "desk_caddy",
    "wooden_two_layer_shelf",
}  # fixtures, though in these folders
PATHS = {Path(path).stem: path for path in GENERATORS if path.count("/") == 2}
PATHS = {name: path for name, path in PATHS.items() if name not in STANDING}
NEW = sorted(PATHS.keys() - {"akita_black_bowl", "plate", "cream_cheese", "wine_bottle"})
# Their own y axis is up when they stand, as LIBERO's samplers place them; the others' z.
Y_UP = set(
    "alphabet_soup ketchup milk new_salad_dressing orange_juice salad_dressing tomato_sauce".split()
)

# Runs in a process of its own: importing libero changes global state.
LOAD = """
import json, sys, tempfile
from pathlib import Path
from vla_gym.suites.libero.upstream_env import prepare
out = sys.stdout
sys.stdout = sys.stderr
with tempfile.TemporaryDirectory() as scratch:
    prepare(Path(root), Path(scratch))
    from libero.libero.envs.objects import get_object_fn
    facts = {}
    for name in names:
        item = get_object_fn(name)(name=f"{name}_1")
        facts[name] = {
            "joints": list(item.joints),
            "sites": sorted(item.sites),
            "bodies": list(item.bodies),
            "root": item.root_body,
            "offsets": [list(map(float, v)) for v in (item.bottom_offset, item.top_offset)],
            "radius": float(item.horizontal_radius),
            "category": item.category_name,
            "rotation": [str(item.rotation), str(item.rotation_axis)],
        }
json.dump(facts, out)
"""


def load_with_upstream(root: Path) -> dict[str, Any]:
    """Return what LIBERO's object classes make of each file of a pack."""
    code = f"root, names = {str(root)!r}, {NEW!r}\n{LOAD}"
    return json.loads(run_python(code, MUJOCO_GL="glx").stdout)


def lite_root(name: str) -> ET.Element:
    """Return one lite object's file as an element."""
    return ET.fromstring(to_text(GENERATORS[PATHS[name]]()))


def on_table(root: ET.Element, folder: Path | None = None) -> mujoco.MjModel:
    """Return a model of one object, free, upright as LIBERO places it, above a plane at z = 0.

    The physics options are robosuite's.

    Args:
        root: The object's file.
        folder: Where its meshes are.
    """
    world = root.find("worldbody")
    outer = world.find("body")
    body = outer.find("body[@name='object']")
    world.remove(outer)
    world.append(body)
    body.set("pos", "0 0 0")
    ET.SubElement(body, "joint", type="free", damping="0.0005")
    plane = {"type": "plane", "size": "1 1 0.1", "friction": "1 0.005 0.0001", "group": "2"}
    ET.SubElement(world, "geom", plane)
    options = {"impratio": "20", "cone": "elliptic", "density": "1.2", "viscosity": "0.00002"}
    root.insert(0, ET.Element("option", options))
    compiler = {"inertiagrouprange": "0 0"}
    if folder is not None:
        compiler |= {"meshdir": str(folder), "texturedir": str(folder)}
    root.insert(0, ET.Element("compiler", compiler))
    return mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"))


def real_on_table(name: str, assets: Path) -> mujoco.MjModel:
    """Return the same with LIBERO's own file."""
    path = assets / PATHS[name]
    return on_table(ET.parse(path).getroot(), path.parent)


def dropped(model: mujoco.MjModel, name: str, height: float, seconds: float) -> mujoco.MjData:
    """Let an object fall from a height of its origin; return the data after a while."""
    data = mujoco.MjData(model)
    angle = np.pi / 4 if name in Y_UP else 0.0
    data.qpos[:] = (0, 0, height, np.cos(angle), np.sin(angle), 0, 0)
    for _ in range(round(seconds / model.opt.timestep)):
        mujoco.mj_step(model, data)
    return data


def start_height(name: str) -> float:
    """Return the height of an object's origin in official states: its marker and 2 cm more."""
    site = lite_root(name).find("worldbody/body/site[@name='bottom_site']")
    return 0.02 - float(site.get("pos").split()[2])


def uprightness(data: mujoco.MjData, name: str) -> float:
    """Return the cosine between the world's z axis and the object's own upward axis."""
    return data.xmat[1].reshape(3, 3)[2, 1 if name in Y_UP else 2]


def solid_bounds(model: mujoco.MjModel) -> np.ndarray:
    """Return the lowest and highest corner (2, 3) of all colliding boxes, in the object's frame."""
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    solid = np.flatnonzero((model.geom_contype > 0) & (model.geom_bodyid > 0))
    assert (model.geom_type[solid] == mujoco.mjtGeom.mjGEOM_BOX).all()
    half = np.abs(data.geom_xmat[solid].reshape(-1, 3, 3)) @ model.geom_size[solid][:, :, None]
    low, high = data.geom_xpos[solid] - half[..., 0], data.geom_xpos[solid] + half[..., 0]
    return np.stack([low.min(axis=0), high.max(axis=0)])


# --- the files ------------------------------------------------------------------------------------


def test_every_object_that_a_task_names_has_a_file():
    tasks = [task for suite in SUITES for task in suite_tasks(suite)]
    named = {category for task in tasks for _, category in task.problem.objects}
    assert named <= PATHS.keys()
    assert set(NEW) <= named, "nobody needs these"


@pytest.mark.libero_assets
def test_upstreams_classes_see_the_same_as_in_the_real_files(libero_assets_dir):
    assert load_with_upstream(resolve_asset_pack().root) == load_with_upstream(libero_assets_dir)


@pytest.mark.libero_assets
@pytest.mark.parametrize("name", NEW)
def test_body_and_rest_are_those_of_the_real_object(name, libero_assets_dir):
    lite, real = on_table(lite_root(name)), real_on_table(name, libero_assets_dir)
    check_body(lite, real)
    check_rest(lite, real, name)


def check_body(lite: mujoco.MjModel, real: mujoco.MjModel) -> None:
    for attribute in ("nbody", "njnt", "nsite"):
        assert getattr(lite, attribute) == getattr(real, attribute)
    for i in range(lite.nsite):
        assert lite.site(i).name == real.site(i).name
    for attribute in ("site_type", "site_pos", "site_size", "body_pos", "body_quat"):
        a, b = getattr(lite, attribute), getattr(real, attribute)
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=attribute)
    np.testing.assert_allclose(np.abs((lite.site_quat * real.site_quat).sum(1)), 1, atol=1e-5)
    np.testing.assert_allclose(lite.body_mass, real.body_mass, rtol=2e-3)
    np.testing.assert_allclose(lite.body_ipos, real.body_ipos, atol=1e-4)
    np.testing.assert_allclose(
        np.sort(lite.body_inertia), np.sort(real.body_inertia), rtol=0.03, atol=1e-12
    )
    solid = [m.geom_contype.astype(bool) & (m.geom_bodyid > 0) for m in (lite, real)]
    for attribute in ("geom_friction", "geom_solref", "geom_solimp", "geom_condim", "geom_margin"):
        a, b = (getattr(m, attribute)[s] for m, s in zip((lite, real), solid, strict=True))
        assert (a == a[0]).all() and (b == a[0]).all(), attribute


def check_rest(lite: mujoco.MjModel, real: mujoco.MjModel, name: str) -> None:
    """Official states let objects fall by a few centimetres: none may topple, roll or bounce on."""
    data, theirs = (dropped(model, name, start_height(name), 0.7) for model in (lite, real))
    assert uprightness(data, name) > 0.9999 and uprightness(theirs, name) > 0.999
    assert np.hypot(*data.qpos[:2]) < 1e-3
    assert np.abs(data.qvel).max() < 1e-3
    bounds = solid_bounds(lite)
    # Contacts of LIBERO's stiffness give way by a tenth of a millimetre at most.
    lowest = bounds[0][1 if name in Y_UP else 2]
    assert data.qpos[2] == pytest.approx(-lowest, abs=2e-4)
    assert data.qpos[2] == pytest.approx(theirs.qpos[2], abs=5e-4)
    # The largest differences are those of round walls (8 or 12 sides here) and of the moka pot,
    # which is narrower so that the gripper closes around it.
    np.testing.assert_allclose(bounds, solid_bounds(real), atol=4e-3)


# --- grasps ---------------------------------------------------------------------------------------

OPENING = 0.08  # between the open finger pads of the Panda's gripper, in metres
QUARTER = np.pi / 2  # the fingers close along y instead of x
GRASPS = {  # x, y and height above the table of the finger tips' pads, direction of closing
    "alphabet_soup": (0, 0, 0.05, QUARTER),
    "tomato_sauce": (0, 0, 0.05, 0),
    "bbq_sauce": (0, 0, 0.06, QUARTER),
    "butter": (0, 0, 0.010, QUARTER),
    "chocolate_pudding": (0, 0, 0.014, QUARTER),
    "cookies": (0, 0, 0.010, 0),
    "ketchup": (0, 0, 0.115, 0),
    "milk": (0, 0, 0.090, 0),
    "orange_juice": (0, 0, 0.090, QUARTER),
    "salad_dressing": (0, 0, 0.115, 0),
    "new_salad_dressing": (0, 0, 0.115, QUARTER),
    "white_bowl": (0.037, 0, 0.022, 0),
    "glazed_rim_porcelain_ramekin": (0.0405, 0, 0.030, 0),
    "black_book": (0, -0.012, 0.110, 0),
    "yellow_book": (0.0016, 0, 0.100, 0),
    "porcelain_mug": (0.0145, 0.041, 0.085, QUARTER),
    "red_coffee_mug": (-0.0153, -0.040, 0.110, QUARTER),
    "white_yellow_mug": (-0.0182, 0.045, 0.080, QUARTER),
    "moka_pot": (0, 0.073, 0.085, 0),
    "chefmate_8_frypan": (0.20, 0, 0.040, QUARTER),
    "basket": (0.078, 0, 0.125, 0),
    "wooden_tray": (0, 0.076, 0.045, QUARTER),
}


def add_gripper(root: ET.Element, x: float, y: float, z: float, yaw: float) -> None:
    """Add two finger tips as large as the Panda's, open by 8 cm, that close and lift."""
    world = root.find("worldbody")
    quat = f"{np.cos(yaw / 2)} 0 0 {np.sin(yaw / 2)}"
    hand = ET.SubElement(world, "body", name="hand", pos=f"{x} {y} {z}", quat=quat, gravcomp="1")
    ET.SubElement(hand, "joint", name="lift", type="slide", axis="0 0 1", damping="50")
    ET.SubElement(hand, "inertial", mass="1", pos="0 0 0", diaginertia="0.01 0.01 0.01")
    actuator = ET.SubElement(root, "actuator")
    ET.SubElement(actuator, "position", joint="lift", kp="1000")
    for name, side in (("left", 1), ("right", -1)):
        pos = f"{side * OPENING / 2} 0 0"
        finger = ET.SubElement(hand, "body", name=name, pos=pos, gravcomp="1")
        slide = {"name": name, "type": "slide", "axis": f"{-side} 0 0", "damping": "10"}
        ET.SubElement(finger, "joint", slide | {"armature": "1"})
        ET.SubElement(finger, "inertial", mass="0.1", pos="0 0 0", diaginertia="1e-4 1e-4 1e-4")
        pad = {"type": "box", "size": "0.004 0.0085 0.0085", "pos": f"{side * 0.004} 0 0"}
        ET.SubElement(finger, "geom", pad | {"friction": "2 0.05 0.0001", "solref": "0.01 0.5"})
        limits = {"kp": "1000", "forcerange": "-20 20", "ctrlrange": "-0.01 0.05"}
        ET.SubElement(actuator, "position", limits | {"joint": name})


@pytest.mark.parametrize("name", NEW)
def test_gripper_lifts_it(name):
    """Closed around it or on its rim or handle, the finger tips carry an object up by 10 cm."""
    low = solid_bounds(on_table(lite_root(name)))[0]
    rest = -low[1 if name in Y_UP else 2]
    half = np.pi / 4 if name in Y_UP else 0.0
    root = lite_root(name)
    add_gripper(root, *GRASPS[name])
    model = on_table(root)
    data = mujoco.MjData(model)
    free = model.jnt_qposadr[np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)[0]]
    data.qpos[free : free + 7] = (0, 0, rest, np.cos(half), np.sin(half), 0, 0)
    data.ctrl[1:] = 0.05
    for step in range(800):
        data.ctrl[0] = 0.10 * np.clip((step - 200) / 400, 0, 1)
        mujoco.mj_step(model, data)
    # What is held at one end sags a little.
    assert data.qpos[free + 2] - rest > 0.085


HOLLOW = {  # a point inside the rim (object frame), the depth that must be free below it
    "basket": ((0.0, 0.0, 0.14), 0.115),
    "wooden_tray": ((0.007, -0.005, 0.06), 0.05),
    "white_bowl": ((0.025, 0.0, 0.035), 0.015),
    "glazed_rim_porcelain_ramekin": ((0.030, 0.0, 0.042), 0.025),
    "chefmate_8_frypan": ((0.05, 0.0, 0.05), 0.03),
    "porcelain_mug": ((0.0143, -0.030, 0.1085), 0.05),
    "red_coffee_mug": ((-0.0153, -0.022, 0.1308), 0.05),
    "white_yellow_mug": ((-0.0182, -0.030, 0.1031), 0.05),
}


@pytest.mark.parametrize("name", HOLLOW)
def test_containers_and_rims_are_hollow(name):
    """Straight down inside the rim there is a free depth, and a closed bottom below it."""
    root = lite_root(name)
    point, depth = HOLLOW[name]
    model = on_table(root)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    hit = np.zeros(1, np.int32)
    groups = np.array([1, 0, 0, 0, 0, 0], np.uint8)
    distance = mujoco.mj_ray(model, data, point, (0.0, 0.0, -1.0), groups, 1, -1, hit)
    assert hit[0] >= 0 and distance > depth


# --- looks ----------------------------------------------------------------------------------------

NOTHING = 0.5  # the grey behind an object
SAME_THING = {("new_salad_dressing", "salad_dressing")}  # both are called "the salad dressing"


@functools.cache
def picture(name: str) -> np.ndarray:
    """Return a 64x64 picture of one object, (64, 64, 3) in [0, 1], always from the same place."""
    root = lite_root(name)
    world = root.find("worldbody")
    ET.SubElement(world, "light", pos="0 0 2", directional="true", castshadow="false")
    body = world.find("body/body[@name='object']")
    half = np.pi / 4 if name in Y_UP else 0.0
    body.set("quat", f"{np.cos(half)} {np.sin(half)} 0 0")
    model = mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    camera = mujoco.MjvCamera()
    camera.lookat[:] = data.geom_xpos.mean(axis=0)
    camera.distance, camera.azimuth, camera.elevation = 0.3, 125, -40
    options = mujoco.MjvOption()
    options.geomgroup[:] = (0, 1, 0, 0, 0, 0)
    options.sitegroup[:] = 0
    with mujoco.Renderer(model, 64, 64) as renderer:
        renderer.update_scene(data, camera, options)
        image = renderer.render() / 255.0
        renderer.enable_segmentation_rendering()
        image[renderer.render()[..., 0] < 0] = NOTHING
        return image


def test_no_two_objects_look_the_same():
    """Over the pixels that either covers, two objects differ by a sixth of a channel's range.

    Two bottles whose labels alone differ reach 0.04; the closest pair of others, the ramekin and
    the white bowl, 0.17.
    """
    closest = {}
    for a, b in itertools.combinations(sorted(PATHS), 2):
        seen = (picture(a) != NOTHING).any(axis=2) | (picture(b) != NOTHING).any(axis=2)
        difference = np.abs(picture(a) - picture(b)).max(axis=2)[seen].mean()
        if (a, b) not in SAME_THING:
            closest[a, b] = difference
    pair = min(closest, key=closest.__getitem__)
    assert closest[pair] > 0.15, (pair, closest[pair])
