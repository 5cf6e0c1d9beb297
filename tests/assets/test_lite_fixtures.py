"""The lite pack's fixtures and rooms against LIBERO's, with MuJoCo alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import mujoco
import numpy as np
import pytest

from vla_gym.assets.lite.generate import GENERATORS
from vla_gym.assets.lite.mjcf import to_text

CABINETS = ("articulated_objects/wooden_cabinet.xml", "articulated_objects/white_cabinet.xml")
MICROWAVE = "articulated_objects/microwave.xml"
CADDY = "turbosquid_objects/desk_caddy/desk_caddy.xml"
SHELF = "turbosquid_objects/wooden_two_layer_shelf/wooden_two_layer_shelf.xml"
FIXTURES = (*CABINETS, MICROWAVE, CADDY, SHELF)
ROOMS = [
    f"scenes/libero_{room}_base_style.xml"
    for room in ("tabletop", "kitchen_tabletop", "living_room_tabletop", "study", "floor")
]


def lite(path: str) -> ET.Element:
    """The generated file; textures, which lie in files of their own, are left out."""
    return without_files(GENERATORS[path]())


def real(folder: Path, path: str) -> ET.Element:
    """LIBERO's file without what is only seen."""
    return without_files(ET.parse(folder / path).getroot())


def without_files(root: ET.Element) -> ET.Element:
    for tag in ("asset", "compiler", "size"):
        for element in root.findall(tag):
            root.remove(element)
    for parent in list(root.iter()):
        for geom in parent.findall("geom"):
            geom.attrib.pop("material", None)
            if geom.get("mesh"):
                parent.remove(geom)
    for geom in root.iter("geom"):  # in <default>
        geom.attrib.pop("material", None)
        if geom.get("type") == "mesh":
            del geom.attrib["type"]
    compiler = {"angle": "radian", "inertiagrouprange": "0 0"}
    root.insert(0, ET.Element("compiler", compiler))
    return root


def compiled(root: ET.Element) -> tuple[mujoco.MjModel, mujoco.MjData]:
    model = mujoco.MjModel.from_xml_string(to_text(root))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def solids(model: mujoco.MjModel) -> np.ndarray:
    return np.flatnonzero((model.geom_contype > 0) | (model.geom_conaffinity > 0))


def occupied(model: mujoco.MjModel, data: mujoco.MjData, points: np.ndarray) -> np.ndarray:
    """Tell which points (N, 3) lie in a solid box or capsule."""
    inside = np.zeros(len(points), bool)
    for i in solids(model):
        local = (points - data.geom_xpos[i]) @ data.geom_xmat[i].reshape(3, 3)
        size = model.geom_size[i]
        if model.geom_type[i] == mujoco.mjtGeom.mjGEOM_BOX:
            inside |= (np.abs(local) < size).all(axis=1)
        else:
            assert model.geom_type[i] == mujoco.mjtGeom.mjGEOM_CAPSULE
            local[:, 2] -= np.clip(local[:, 2], -size[1], size[1])
            inside |= np.linalg.norm(local, axis=1) < size[0]
    return inside


@pytest.mark.libero_assets
@pytest.mark.parametrize("path", FIXTURES)
def test_bodies_joints_sites_and_solids_are_the_real_ones(libero_assets_dir, path):
    ours, theirs = compiled(lite(path)), compiled(real(libero_assets_dir, path))
    check_bodies(ours, theirs)
    # The solids fill the same space.
    points = np.random.default_rng(0).uniform((-0.2, -0.23, -0.01), (0.2, 0.23, 0.24), (60_000, 3))
    a, b = occupied(*ours, points), occupied(*theirs, points)
    assert b.mean() > 0.01
    assert (a & b).sum() / (a | b).sum() > OVERLAP[path]
    np.testing.assert_allclose(points[a].min(axis=0), points[b].min(axis=0), atol=0.004)
    np.testing.assert_allclose(points[a].max(axis=0), points[b].max(axis=0), atol=0.004)


# Measured: share of the joint volume that both fill. Walls are 2 to 14 mm thin.
OVERLAP = dict.fromkeys(CABINETS, 0.94) | {MICROWAVE: 0.99, CADDY: 0.98, SHELF: 0.96}


def check_bodies(
    ours: tuple[mujoco.MjModel, mujoco.MjData], theirs: tuple[mujoco.MjModel, mujoco.MjData]
) -> None:
    (a, da), (b, db) = ours, theirs
    for count, kind in (("nbody", "BODY"), ("njnt", "JOINT"), ("nsite", "SITE")):
        number = getattr(b, count)
        assert getattr(a, count) == number
        for i in range(number):
            code = getattr(mujoco.mjtObj, f"mjOBJ_{kind}")
            assert mujoco.mj_id2name(a, code, i) == mujoco.mj_id2name(b, code, i)
    for name in ("jnt_type", "jnt_axis", "jnt_pos", "jnt_range", "dof_damping", "body_pos"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-6, err_msg=name)
    for name in ("site_type", "site_size", "site_pos"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-6, err_msg=name)
    np.testing.assert_allclose(da.site_xmat, db.site_xmat, atol=2e-5)
    np.testing.assert_allclose(a.body_mass, b.body_mass, rtol=2e-3)
    np.testing.assert_allclose(a.dof_M0, b.dof_M0, rtol=0.03)


@pytest.mark.parametrize("path", [*CABINETS, MICROWAVE])
def test_joints_run_through_their_range_and_stay(path):
    model, data = compiled(lite(path))
    # A drawer's face meets the shell 2 mm behind the closed position, as LIBERO's does: the
    # joint's own limit is at 10 mm.
    force, closed = (1.0, 0.0) if path == MICROWAVE else (20.0, 0.0023)
    assert data.ncon == 0, "parts touch each other at rest"
    for joint in range(model.njnt):
        for target, push in ((model.jnt_range[joint, 0], -force), (closed, force)):
            data.qfrc_applied[joint] = push
            for _ in range(1500):
                mujoco.mj_step(model, data)
                if data.ncon:
                    assert data.qpos[joint] > 0, "parts touch each other on the way"
            assert data.qpos[joint] == pytest.approx(target, abs=0.003)
            data.qfrc_applied[joint] = 0
            for _ in range(500):
                mujoco.mj_step(model, data)
            assert data.qpos[joint] == pytest.approx(target, abs=0.004)


def with_finger(path: str, shape: str) -> tuple[mujoco.MjModel, mujoco.MjData]:
    root = lite(path)
    finger = ET.SubElement(root.find("worldbody"), "body", name="finger", mocap="true", pos="0 0 3")
    ET.SubElement(finger, "geom", type="box", size=shape, friction="1 0.005 0.0001")
    return compiled(root)


@pytest.mark.parametrize("path", CABINETS)
@pytest.mark.parametrize("level", ["top", "middle", "bottom"])
def test_a_finger_behind_the_handle_pulls_the_drawer_open(path, level):
    model, data = with_finger(path, "0.0095 0.006 0.012")
    height = {"top": 0.184, "middle": 0.1104, "bottom": 0.0411}[level]
    joint = model.joint(f"{level}_level").qposadr[0]
    for step in range(1700):
        data.mocap_pos[0] = (-0.003, -0.0865 - 1e-4 * step, height)
        mujoco.mj_step(model, data)
        if step == 0:
            assert all(c.dist > -1e-3 for c in data.contact), "the finger does not fit"
    assert data.qpos[joint] < -0.14
    assert np.abs(np.delete(data.qpos, joint)).max() < 0.005, "another drawer came along"


def test_a_finger_behind_the_handle_opens_the_microwave():
    model, data = with_finger(MICROWAVE, "0.006 0.006 0.0095")
    hinge, arm = np.array([-0.1725, -0.088]), np.array([0.2375, -0.0345])
    for step in range(7500):
        # Slowly: a mocap body counts as resting in each step, so contacts brake the door.
        angle = -2e-4 * step
        turned = [
            arm[0] * np.cos(angle) - arm[1] * np.sin(angle),
            arm[0] * np.sin(angle) + arm[1] * np.cos(angle),
        ]
        data.mocap_pos[0] = (*(hinge + turned), 0.096)
        data.mocap_quat[0] = (np.cos(angle / 2), 0, 0, np.sin(angle / 2))
        mujoco.mj_step(model, data)
    assert data.qpos[0] < -1.35, "LIBERO calls the door open below -1.3"


@pytest.mark.parametrize(
    ("path", "region", "opened", "half"),
    [
        (CADDY, "left_contain_region", 0.0, 0.03),
        (CADDY, "right_contain_region", 0.0, 0.03),
        (CADDY, "front_contain_region", 0.0, 0.02),
        (CADDY, "back_contain_region", 0.0, 0.02),
        *[
            (path, f"{level}_region", -0.15, 0.025)
            for path in CABINETS
            for level in ("top", "middle", "bottom")
        ],
        (MICROWAVE, "heating_region", -1.9, 0.05),
        (SHELF, "top_region", 0.0, 0.04),
    ],
)
def test_a_cube_comes_to_rest_inside_the_region(path, region, opened, half):
    root, size = lite(path), f"{half} {half} {half}"
    cube = ET.SubElement(root.find("worldbody"), "body", name="cube")
    ET.SubElement(cube, "freejoint")
    ET.SubElement(cube, "geom", type="box", size=size, solref="0.001 1", friction="0.95 0.3 0.1")
    model, data = compiled(root)
    for joint in range(model.njnt - 1):
        data.qpos[joint] = opened
    mujoco.mj_forward(model, data)
    site = model.site(region).id
    centre = data.site_xpos[site]
    if region == "heating_region":
        centre = centre - (0.04, 0, 0)  # the region reaches into the oven's right wall
    data.qpos[-7:-4] = centre
    for _ in range(1000):
        mujoco.mj_step(model, data)
    extent = np.abs(data.site_xmat[site].reshape(3, 3)) @ model.site_size[site]
    offset = data.body("cube").xpos - data.site_xpos[site]
    assert (np.abs(offset) < extent).all()
    assert np.linalg.norm(data.qvel) < 0.01
    assert data.body("cube").xmat[8] > 0.999, "the cube lies askew"


# --- rooms ----------------------------------------------------------------------------------------


def heights(root: ET.Element, xy: np.ndarray) -> np.ndarray:
    """Height of what a ray from above meets first, among solids."""
    model, data = compiled(root)
    hidden = np.setdiff1d(np.arange(model.ngeom), solids(model))
    model.geom_group[:] = 0
    model.geom_group[hidden] = 5
    groups = np.array([1, 0, 0, 0, 0, 0], np.uint8)
    geom = np.zeros(1, np.int32)
    start, down = np.array([0, 0, 3.0]), np.array([0, 0, -1.0])
    found = []
    for start[:2] in xy:
        found.append(3 - mujoco.mj_ray(model, data, start, down, groups, 1, -1, geom))
    return np.array(found)


@pytest.mark.libero_assets
@pytest.mark.parametrize("path", ROOMS)
def test_surfaces_cameras_and_bodies_are_the_real_ones(libero_assets_dir, path):
    ours, theirs = lite(path), real(libero_assets_dir, path)
    grid = np.stack(np.meshgrid(np.arange(-0.8, 0.85, 0.05), np.arange(-0.8, 0.85, 0.05)), -1)
    a, b = (heights(root, grid.reshape(-1, 2)) for root in (ours, theirs))
    assert np.mean(np.abs(a - b) < 1e-3) > 0.98, "surfaces of other heights or outlines"
    # Where the tasks' objects stand, within the robot's reach.
    near = (np.abs(grid.reshape(-1, 2)) < 0.4).all(axis=1)
    np.testing.assert_allclose(a[near], b[near], atol=1e-3)
    for tag in ("body", "camera"):
        names = [[e.get("name") for e in root.iter(tag)] for root in (ours, theirs)]
        assert names[0] == names[1]
    (m, _), (r, _) = compiled(ours), compiled(theirs)
    np.testing.assert_allclose(m.body_pos, r.body_pos, atol=1e-6)
    np.testing.assert_allclose(m.cam_pos, r.cam_pos, atol=1e-5)
    np.testing.assert_allclose(np.abs((m.cam_quat * r.cam_quat).sum(axis=1)), 1, atol=1e-5)
