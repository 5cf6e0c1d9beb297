"""Task models: content, cache, locking, the compile process and its errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from run_python import ROOT

from vla_gym.assets import AssetPack, resolve_asset_pack
from vla_gym.errors import CompileError
from vla_gym.files import only_process
from vla_gym.outside import read_json
from vla_gym.suites import disk_cache as cache
from vla_gym.suites import get_task, suite_tasks
from vla_gym.suites.disk_cache import FILES, MANIFEST, SceneRequest
from vla_gym.suites.libero import load_task_model, model, requests
from vla_gym.suites.libero.requests import scene_request
from vla_gym.suites.libero.scene_file import SceneFile
from vla_gym.suites.libero.tasks import LiberoTask


def request(scene: str = "goal", digest: str = "digest", root: Path = ROOT) -> SceneRequest:
    return scene_request(scene, AssetPack("lite", root, digest), suite_tasks("goal"))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the compile process by one that writes three small files; returns its log."""
    calls: list[str] = []

    def fake(asked: SceneRequest, scratch: Path, out: Path, timeout_s: float) -> None:
        calls.append(asked.scene)
        for name in FILES:
            (out / name).write_bytes(f"{name} of {asked.scene}".encode() * 100)

    monkeypatch.setattr(cache, "_run_compiler", fake)
    return calls


def test_damaged_official_states_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, file, refused = get_task("goal", 7), tmp_path / "states.npz", 0
    good = task.init_states_file.read_bytes()
    monkeypatch.setattr(LiberoTask, "init_states_file", property(lambda _: file))
    for place in range(40, len(good), 50):  # inside and behind the compressed numbers
        file.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        try:
            model._official_states(task, 79)
        except CompileError:
            refused += 1
    assert refused > 120


def test_wrong_addresses_name_their_file(tmp_path: Path) -> None:
    folder = load_task_model(get_task("goal", 7), "lite").mjb_path.parent
    scene = json.loads((folder / "scene.json").read_text())
    scene["robot"]["joint_qpos"] = [99_999]
    (tmp_path / "scene.json").write_text(json.dumps(scene))
    with pytest.raises(CompileError, match=r"scene\.json: addresses \[99999\] are not all in 0"):
        read_json(tmp_path / "scene.json", SceneFile, CompileError)


def test_all_tasks_share_one_model_and_differ_in_their_goals() -> None:
    models = [load_task_model(task) for task in suite_tasks("goal")]
    assert len({m.scene_key for m in models}) == len({m.mjb_path for m in models}) == 1
    assert {m.goal[0].text for m in models} == {
        "open wooden_cabinet_1_middle_region",
        "on akita_black_bowl_1 flat_stove_1_cook_region",
        "on wine_bottle_1 wooden_cabinet_1_top_side",
        "in akita_black_bowl_1 wooden_cabinet_1_top_region",
        "on akita_black_bowl_1 wooden_cabinet_1_top_side",
        "on plate_1 main_table_stove_front_region",
        "on cream_cheese_1 akita_black_bowl_1",
        "turnon flat_stove_1",
        "on akita_black_bowl_1 plate_1",
        "on wine_bottle_1 wine_rack_1_top_region",
    }
    assert all(m.init_states.shape == (50, 1 + m.nq + m.nv) for m in models)
    assert len({m.init_states.tobytes() for m in models}) == 10


@pytest.mark.parametrize("assets", ["lite", pytest.param("real", marks=pytest.mark.libero_assets)])
def test_names_and_ids_agree_with_the_model(assets: str, request: pytest.FixtureRequest) -> None:
    import mujoco

    pack = assets if assets == "lite" else request.getfixturevalue("libero_assets_dir")
    task_model = load_task_model(get_task("goal", 7), pack)
    model = mujoco.MjModel.from_binary_path(str(task_model.mjb_path))
    assert (model.nq, model.nv) == (task_model.nq, task_model.nv) == (41, 37)
    assert list(task_model.objects) == [
        "akita_black_bowl_1",
        "cream_cheese_1",
        "wine_bottle_1",
        "plate_1",
        "wooden_cabinet_1",
        "flat_stove_1",
        "wine_rack_1",
    ]
    for name, spec in task_model.objects.items():
        assert model.body(spec.body).id == spec.body_id > 0
        bodies = model.geom_bodyid[spec.contact_geom_ids]
        assert (model.body_rootid[bodies] == spec.body_id).all()
        assert len(spec.contact_geom_ids) > 0 and spec.is_fixture == (name in task_model.fixtures)
        assert all(model.joint(joint).id >= 0 for joint in spec.joints)
    robot = task_model.robot
    assert model.site(robot.eef_site).id > 0
    arm = [model.joint(f"robot0_joint{i + 1}") for i in range(7)]
    assert [j.qposadr[0] for j in arm] == robot.joint_qpos.tolist()
    assert [j.dofadr[0] for j in arm] == robot.joint_qvel.tolist()
    assert np.array_equal(model.actuator_ctrlrange[robot.joint_actuators, 0], robot.torque_low)
    assert np.array_equal(model.actuator_ctrlrange[robot.joint_actuators, 1], robot.torque_high)
    fingers = model.actuator_ctrlrange[robot.gripper_actuators]
    assert np.allclose(robot.gripper_bias - robot.gripper_weight, fingers[:, 0])
    assert np.allclose(robot.gripper_bias + robot.gripper_weight, fingers[:, 1])
    assert (robot.kp, robot.damping_ratio, robot.substeps) == (150.0, 1.0, 25)
    assert (robot.position_scale, robot.rotation_scale) == (0.05, 0.5)
    (burner,) = task_model.indicators
    assert model.site(burner.site).id == burner.site_id
    assert model.site_rgba[burner.site_id, 3] == burner.alpha_off <= 0 < burner.alpha_on
    assert (burner.comparison, burner.threshold) == (">=", 0.5)
    assert task_model.joint_inits == []
    for name, address in task_model.free_qpos.items():
        assert model.joint(task_model.objects[name].joints[-1]).qposadr[0] == address


def test_cache_is_used_and_keyed(tmp_path: Path, compiles: list[str]) -> None:
    folder = cache.load_scene(request(), tmp_path)
    assert cache.load_scene(request(), tmp_path) == folder
    assert compiles == ["goal"]
    assert sorted(p.name for p in folder.iterdir()) == sorted((*FILES, MANIFEST))
    assert cache.load_scene(request(digest="another"), tmp_path) != folder
    assert len(compiles) == 2
    leftovers = [p.name for p in (tmp_path / "scenes").iterdir() if p.name.startswith(".")]
    assert leftovers == []


def test_versions_and_sources_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = request().key()
    assert request().key() == key
    for function, value in [
        ("package_versions", {"mujoco": "mujoco 9"}),
        ("_digest", "changed"),
        ("_tasks_digest", "changed"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(requests, function, lambda *_, value=value: value)
            assert request().key() != key, function


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "delete", "folder"])
def test_damaged_files_are_rebuilt(
    tmp_path: Path,
    compiles: list[str],
    name: str,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = cache.load_scene(request(), tmp_path) / name
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    caplog.clear()
    folder = cache.load_scene(request(), tmp_path)
    assert len(compiles) == 2
    assert caplog.messages[0].endswith(".") and not caplog.messages[0].endswith("..")
    assert cache.verify(folder, request().key())
    if name != MANIFEST:
        assert path.read_bytes() == content


def test_a_foreign_scene_is_rebuilt(tmp_path: Path, compiles: list[str]) -> None:
    other = cache.load_scene(request("another"), tmp_path)
    mine = tmp_path / "scenes" / request().key()
    shutil.copytree(other, mine)  # complete and undamaged, but not what the name says
    assert cache.load_scene(request(), tmp_path) == mine
    assert compiles == ["another", "goal"]
    assert b"of goal" in (mine / "scene.mjb").read_bytes()
    # A file in the scene's place is no obstacle either, nor is a foreign file list.
    shutil.rmtree(mine)
    mine.write_text("not a folder")
    cache.load_scene(request(), tmp_path)
    manifest = json.loads((mine / MANIFEST).read_text())
    manifest["sha256"].pop("scene.json")
    (mine / MANIFEST).write_text(json.dumps(manifest))
    cache.load_scene(request(), tmp_path)
    assert compiles == ["another", "goal", "goal", "goal"]


def test_two_processes_compile_once(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from vla_gym.suites import disk_cache as cache, suite_tasks
from vla_gym.assets import AssetPack
from vla_gym.suites.libero.requests import scene_request

def slow(request, scratch, out, timeout_s):
    with open({str(tmp_path / "log")!r}, "a") as log:
        log.write("compiled\\n")
    time.sleep(1.0)
    for name in cache.FILES:
        (out / name).write_bytes(name.encode())

cache._run_compiler = slow
request = scene_request("goal", AssetPack("lite", Path("assets"), "digest"), suite_tasks("goal"))
assert cache.verify(cache.load_scene(request, Path({str(tmp_path)!r})), request.key())
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
        for _ in range(2)
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "compiled\n"


def test_a_lock_that_is_never_freed_is_reported(tmp_path: Path, compiles: list[str]) -> None:
    path = tmp_path / "scenes" / f"{request().key()}.lock"
    path.parent.mkdir()
    with only_process(path, ""), pytest.raises(CompileError, match="Another process has held"):
        cache.load_scene(request(), tmp_path, timeout_s=0.2)
    cache.load_scene(request(), tmp_path, timeout_s=0.2)


def test_a_lock_does_not_follow_links(tmp_path: Path, compiles: list[str]) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    lock = tmp_path / "scenes" / f"{request().key()}.lock"
    lock.parent.mkdir()
    lock.symlink_to(mine)
    with pytest.raises(CompileError, match="symbolic link"):
        cache.load_scene(request(), tmp_path)
    assert mine.read_text() == "kept" and compiles == []


def test_the_compile_process_has_a_deadline(tmp_path: Path) -> None:
    slow = scene_request("goal", resolve_asset_pack("lite"), suite_tasks("goal"))
    begin = time.monotonic()
    with pytest.raises(CompileError, match="took more than 0.3 s"):
        cache.load_scene(slow, tmp_path, timeout_s=0.3)
    assert time.monotonic() - begin < 10
    assert [p for p in (tmp_path / "scenes").iterdir() if p.is_dir()] == []


def test_a_failing_compiler_shows_its_output(tmp_path: Path) -> None:
    broken = tmp_path / "assets"
    shutil.copytree(resolve_asset_pack("lite").root, broken)
    bowl = broken / "stable_scanned_objects" / "akita_black_bowl" / "akita_black_bowl.xml"
    bowl.write_text("<mujoco><worldbody>")
    asked = request(digest="broken", root=broken)
    with pytest.raises(CompileError, match="ParseError") as caught:
        cache.load_scene(asked, tmp_path / "cache")
    message = str(caught.value)
    assert "Compiling scene 'goal' from the 'lite' assets" in message and "ended with 1" in message
    assert str(broken) in message and "google_scanned_objects.py" in message


def test_missing_system_libraries_are_named() -> None:
    output = "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"
    assert "apt-get install libgl1" in cache._advice(output)
    assert cache._advice("ValueError: something else") == ""


def test_the_compile_process_ends_with_its_parent(tmp_path: Path) -> None:
    asked = scene_request("goal", resolve_asset_pack("lite"), suite_tasks("goal"))
    file = tmp_path / "request.json"
    file.write_text(json.dumps(asked.arguments | {"out": str(tmp_path)}))
    child = subprocess.Popen(
        [sys.executable, "-m", "vla_gym.suites.libero.compile_scene", str(file)],
        env=cache._compiler_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdin is not None
    child.stdin.close()  # what the end of the parent does
    assert child.wait(30) == 1
    assert not (tmp_path / "scene.mjb").exists()


def test_an_unwritable_cache_is_one_clear_error(tmp_path: Path, compiles: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileError, match="VLA_GYM_CACHE"):
        cache.load_scene(request(), tmp_path / "file")


def _aged(folder: Path, days: float) -> Path:
    """Give a scene's manifest another age."""
    manifest = folder / MANIFEST
    past = time.time() - days * 86400
    os.utime(manifest, (past, past))
    return folder


def _copy(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(name)))


def test_building_a_scene_removes_unused_ones(tmp_path: Path, compiles: list[str]) -> None:
    first = cache.load_scene(request(), tmp_path)
    gone = _aged(_copy(first, "unused"), 31)
    kept = _aged(_copy(first, "lately-used"), 29)
    killed = tmp_path / "scenes" / ".goal-lite-killed"
    killed.mkdir()
    os.utime(killed, (0, 0))
    cache.load_scene(request(), tmp_path)  # nothing is built: nothing goes
    assert all(folder.is_dir() for folder in (gone, kept, killed))
    cache.load_scene(request("another"), tmp_path)
    assert first.is_dir() and kept.is_dir()
    assert not gone.exists() and not killed.exists()
    assert not [p for p in (tmp_path / "scenes").iterdir() if p.name.startswith(".")]


def test_loading_a_scene_counts_as_use(tmp_path: Path, compiles: list[str]) -> None:
    folder = _aged(cache.load_scene(request(), tmp_path), 99)
    cache.load_scene(request(), tmp_path)
    assert time.time() - (folder / MANIFEST).stat().st_mtime < 60
