"""The asset resolver, the generated lite pack and the low-poly robot."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mujoco
import numpy as np
import pytest
from run_python import run_python

from vla_gym.assets import cache_dir, resolve_asset_pack
from vla_gym.assets.lite import generate, rings, scenes
from vla_gym.assets.lite.mjcf import to_text
from vla_gym.assets.lite.robot import simplify_robot
from vla_gym.errors import AssetError, CompileError
from vla_gym.sim import LiberoSim
from vla_gym.sim.model_io import load_shared
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model

BOWL = "stable_scanned_objects/akita_black_bowl/akita_black_bowl.xml"
MOVABLES = ("akita_black_bowl_1", "cream_cheese_1", "wine_bottle_1", "plate_1")
# Heights at which LIBERO's own objects rest on the table of height 0.9.
REST_HEIGHTS = dict(zip(MOVABLES, (0.8984, 0.9089, 0.8989, 0.9025), strict=True))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLA_GYM_LIBERO_ASSETS", raising=False)
    return tmp_path / "cache"


# --- generation -----------------------------------------------------------------------------------


def test_importing_writes_nothing_and_loads_no_simulator(tmp_path):
    code = (
        "import sys, vla_gym.assets.pack, vla_gym.assets.lite.generate, vla_gym.assets.lite.robot\n"
        "print(sorted({'mujoco', 'robosuite', 'libero', 'torch'} & set(sys.modules)))"
    )
    folders = {"HOME": str(tmp_path), "VLA_GYM_CACHE": str(tmp_path / "cache")}
    assert run_python(code, **folders).stdout == "[]\n"
    assert not (tmp_path / "cache").exists()


def test_files_are_the_same_in_every_process():
    code = (
        "import hashlib, json; from vla_gym.assets.lite.generate import pack_files\n"
        "print(json.dumps({k: hashlib.sha256(v).hexdigest() for k, v in pack_files().items()}))"
    )
    expected = {k: hashlib.sha256(v).hexdigest() for k, v in generate.pack_files().items()}
    assert json.loads(run_python(code, PYTHONHASHSEED="1").stdout) == expected


def test_digest_follows_the_source(tmp_path, monkeypatch):
    copy, digest = tmp_path / "lite", generate.source_digest()
    shutil.copytree(Path(generate.__file__).parent, copy, ignore=shutil.ignore_patterns("__py*"))
    monkeypatch.setattr(generate, "__file__", str(copy / "generate.py"))
    assert generate.source_digest() == digest
    with (copy / "palette.py").open("a") as file:
        file.write("# a change\n")
    assert generate.source_digest() != digest


def test_lite_pack_is_complete_and_reused(own_cache):
    pack = resolve_asset_pack()
    assert pack.name == "lite" and pack.root.is_relative_to(own_cache)
    assert cache_dir() == own_cache
    textures = [f"textures/{n}" for n in scenes.FLOOR_TEXTURES + scenes.WALL_TEXTURES]
    for relative in [*generate.GENERATORS, *textures]:
        assert (pack.root / relative).is_file(), relative
    written = (pack.root / BOWL).stat().st_mtime_ns
    assert resolve_asset_pack("lite") == pack
    assert (pack.root / BOWL).stat().st_mtime_ns == written
    # By path it is still known as what it is.
    assert resolve_asset_pack(pack.root) == pack
    (pack.root / BOWL).write_text("<mujoco/>")
    with pytest.raises(AssetError, match="generated lite pack, but stable_scanned_objects"):
        resolve_asset_pack(pack.root)


def test_damaged_lite_pack_is_written_again(own_cache):
    pack = resolve_asset_pack()
    bowl, manifest = pack.root / BOWL, pack.root / generate.MANIFEST
    for damage in (
        lambda: bowl.write_text("<mujoco/>"),
        bowl.unlink,
        lambda: manifest.write_text("{}"),
    ):
        damage()
        assert resolve_asset_pack() == pack
        assert bowl.read_text() == to_text(rings.akita_black_bowl())
        names = {p.name for p in pack.root.parent.iterdir()}
        assert names == {pack.root.name, f"{pack.root.name}.lock"}, "left-overs"


def test_many_can_generate_at_once(own_cache):
    with ThreadPoolExecutor(8) as pool:
        packs = set(pool.map(lambda _: resolve_asset_pack(), range(16)))
    (pack,) = packs
    names = {p.name for p in (own_cache / "assets").iterdir()}
    assert names == {pack.root.name, f"{pack.root.name}.lock"}


# --- errors and paths -----------------------------------------------------------------------------


def test_missing_path(tmp_path):
    with pytest.raises(AssetError, match=r"nowhere does not exist\. Give 'lite'"):
        resolve_asset_pack(tmp_path / "nowhere")
    for path in ("~nobody-is-called-so/x", "n" * 300):
        with pytest.raises(AssetError, match=f"{path} does not exist"):
            resolve_asset_pack(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="is not a folder"):
        resolve_asset_pack(str(tmp_path / "file"))


# --- geometry -------------------------------------------------------------------------------------


def solid_corners(model: mujoco.MjModel) -> np.ndarray:
    """Corners (N, 3) of all colliding boxes of a one-body model, in the body frame."""
    corners = []
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    for i in np.flatnonzero(model.geom_contype):
        assert model.geom_type[i] == mujoco.mjtGeom.mjGEOM_BOX
        rotation = np.zeros(9)
        mujoco.mju_quat2Mat(rotation, model.geom_quat[i])
        corners.append(model.geom_pos[i] + (signs * model.geom_size[i]) @ rotation.reshape(3, 3).T)
    return np.concatenate(corners)


def test_bowl_and_plate_have_the_sizes_that_grasps_rely_on():
    bowl = solid_corners(mujoco.MjModel.from_xml_string(to_text(rings.akita_black_bowl())))
    assert bowl[:, 2].min() == pytest.approx(0.0016, abs=1e-6)
    assert bowl[:, 2].max() == pytest.approx(0.052, abs=5e-4)
    assert np.hypot(*bowl[:, :2].T).max() == pytest.approx(0.054, abs=1e-3)
    plate = solid_corners(mujoco.MjModel.from_xml_string(to_text(rings.plate())))
    assert plate[:, 2].min() == pytest.approx(-0.0025, abs=1e-6)
    assert np.hypot(*plate[:, :2].T).max() == pytest.approx(0.070, abs=1e-3)


@pytest.mark.parametrize(
    "relative", [name for name in generate.GENERATORS if not name.startswith("scenes/")]
)
def test_every_visual_is_free_of_contacts_and_every_solid_hidden(relative):
    model = mujoco.MjModel.from_xml_path(str(resolve_asset_pack().root / relative))
    visual = model.geom_group == 1
    assert set(model.geom_group) == {0, 1}
    assert not (model.geom_contype[visual].any() or model.geom_conaffinity[visual].any())
    # The oven never touches itself; everything else collides with everything.
    assert (model.geom_contype[~visual] > 0).all() == ("microwave" not in relative)
    assert model.geom_conaffinity[~visual].all()
    # A frame costs time for every visual, a contact test for every solid.
    assert model.ngeom < 70


# --- the robot ------------------------------------------------------------------------------------


def test_simplify_robot_refuses_another_robot():
    with pytest.raises(CompileError, match="robosuite's Panda.*robot0_link0"):
        simplify_robot("<mujoco><worldbody/></mujoco>")


# --- the compiled scene ---------------------------------------------------------------------------


def names(model: mujoco.MjModel, kind: mujoco.mjtObj, count: int) -> list[str]:
    return [mujoco.mj_id2name(model, kind, i) for i in range(count)]


def test_scene_is_light_and_the_robot_low_poly():
    model = load_shared(load_task_model(get_task("goal", 0))).model
    drawn = (model.geom_group == 1) & (model.geom_rgba[:, 3] > 0)
    assert drawn.sum() < 130
    assert not (model.geom_type[drawn] == mujoco.mjtGeom.mjGEOM_MESH).any()
    solid = model.geom_contype.astype(bool)
    used = {model.geom_dataid[i] for i in np.flatnonzero(solid | (model.geom_conaffinity > 0))}
    assert model.nmesh == len(used - {-1}), "a mesh that nothing collides with was left behind"


@pytest.mark.libero_assets
def test_model_has_the_layout_of_the_real_one(libero_assets_dir):
    # Copies of their own: simulations of other tests write fixture poses into the shared model.
    lite, real = (
        mujoco.MjModel.from_binary_path(str(load_task_model(get_task("goal", 0), pack).mjb_path))
        for pack in ("lite", libero_assets_dir)
    )
    kinds = mujoco.mjtObj
    for kind, attribute in (
        (kinds.mjOBJ_BODY, "nbody"),
        (kinds.mjOBJ_JOINT, "njnt"),
        (kinds.mjOBJ_SITE, "nsite"),
        (kinds.mjOBJ_ACTUATOR, "nu"),
        (kinds.mjOBJ_CAMERA, "ncam"),
        (kinds.mjOBJ_SENSOR, "nsensor"),
    ):
        count = getattr(lite, attribute)
        assert count == getattr(real, attribute)
        assert names(lite, kind, count) == names(real, kind, count)
    exact = ("jnt_type", "jnt_range", "jnt_axis", "jnt_pos", "jnt_qposadr", "dof_damping")
    exact += ("dof_armature", "dof_frictionloss", "site_type", "site_size", "site_pos", "qpos0")
    exact += ("body_parentid", "body_pos", "actuator_ctrlrange", "actuator_gainprm", "site_bodyid")
    for attribute in exact:
        a, b = getattr(lite, attribute), getattr(real, attribute)
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=attribute)
    # A quaternion and its negative are the same rotation.
    aligned = np.abs((lite.site_quat * real.site_quat).sum(axis=1))
    np.testing.assert_allclose(aligned, 1.0, atol=1e-5)
    np.testing.assert_allclose(lite.body_mass, real.body_mass, rtol=2e-3, atol=1e-9)
    for name in MOVABLES:
        a, b = lite.body(f"{name}_main"), real.body(f"{name}_main")
        np.testing.assert_allclose(np.sort(a.inertia), np.sort(b.inertia), rtol=0.15)
        np.testing.assert_allclose(a.ipos, b.ipos, atol=6e-3)
    robot = [i for i in range(lite.nbody) if lite.body(i).name.startswith(("robot", "grip"))]
    np.testing.assert_array_equal(lite.body_inertia[robot], real.body_inertia[robot])


def check_settled(task_ids: range, state_ids: range) -> None:
    """Official states come to rest where LIBERO's do: slow, level, in place, on the table."""
    for task_id in task_ids:
        task_model = load_task_model(get_task("goal", task_id))
        sim = LiberoSim(task_model)
        for state_id in state_ids:
            where = f"task {task_id}, state {state_id}"
            sim.reset(task_model.official_layout(state_id), settle=False)
            before = {name: sim.body_pos(f"{name}_main") for name in MOVABLES}
            sim.reset(task_model.official_layout(state_id), settle=True)
            assert max(sim.object_speeds().values()) < 0.01, where
            for name in MOVABLES:
                position = sim.body_pos(f"{name}_main")
                # A bowl that leans on a drawer's handle stands 0.4 mm higher, as in LIBERO.
                assert position[2] == pytest.approx(REST_HEIGHTS[name], abs=1e-3), (where, name)
                assert np.hypot(*(position - before[name])[:2]) < 0.005, (where, name)
                assert sim.body_mat(f"{name}_main")[2, 2] > 0.999, (where, name)


def test_some_official_states_settle_in_all_tasks():
    check_settled(range(10), range(0, 50, 17))


@pytest.mark.slow
def test_all_official_states_settle():
    check_settled(range(10), range(50))
