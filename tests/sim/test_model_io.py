"""Models of a process: shared while they are used, kept within bounds when they are not."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mujoco
import pytest

from vla_gym.assets import AssetPack
from vla_gym.errors import CompileError
from vla_gym.sim import model_io
from vla_gym.suites.disk_cache import SceneRequest, verify
from vla_gym.suites.libero import TaskModel
from vla_gym.suites.libero.compile_scene import save_model


@pytest.fixture
def scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TaskModel]:
    """Five small scenes; the latest three may stay when nobody uses them."""
    monkeypatch.setattr(model_io, "_latest", type(model_io._latest)())
    monkeypatch.setattr(model_io, "_shared", weakref.WeakValueDictionary())
    model = mujoco.MjModel.from_xml_string("<mujoco><worldbody/></mujoco>")
    made: list[Any] = []
    for index in range(5):
        path = tmp_path / f"{index}.mjb"
        mujoco.mj_saveModel(model, str(path), None)
        made.append(SimpleNamespace(scene_key=f"scene-{index}", mjb_path=path))
    size = made[0].mjb_path.stat().st_size
    monkeypatch.setattr(model_io, "_MAX_LATEST_BYTES", 3 * size)
    return cast(list[TaskModel], made)


def test_the_latest_models_stay_and_older_ones_go(scenes: list[TaskModel]) -> None:
    seen = [weakref.ref(model_io.load_shared(scene)) for scene in scenes]
    gc.collect()
    assert [ref() is not None for ref in seen] == [False, False, True, True, True]
    model_io.load_shared(scenes[2])  # used again: the next one to go is another
    model_io.load_shared(scenes[0])
    gc.collect()
    assert [ref() is not None for ref in seen] == [False, False, True, False, True]


def test_a_model_in_use_stays_the_only_one_of_its_scene(scenes: list[TaskModel]) -> None:
    used = model_io.load_shared(scenes[0])
    for scene in scenes[1:]:
        model_io.load_shared(scene)
    gc.collect()
    assert model_io.load_shared(scenes[0]) is used


def test_one_model_larger_than_the_bound_is_kept(
    scenes: list[TaskModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_io, "_MAX_LATEST_BYTES", 1)
    first = weakref.ref(model_io.load_shared(scenes[0]))
    gc.collect()
    assert model_io.load_shared(scenes[0]) is first()


def test_a_model_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    model = mujoco.MjModel.from_xml_string("<mujoco><worldbody/></mujoco>")
    mujoco.mj_saveModel(model, str(tmp_path / "theirs.mjb"), None)
    save_model(model, tmp_path / "ours.mjb")
    assert (tmp_path / "ours.mjb").read_bytes() == (tmp_path / "theirs.mjb").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        save_model(model, Path("/dev/full"))


def test_a_scene_that_cannot_be_read_is_built_anew(tmp_path: Path, scenes: list[TaskModel]) -> None:
    content = Path(scenes[0].mjb_path).read_bytes()
    request = SceneRequest("toy", AssetPack("lite", tmp_path, "digest"), "none", {}, {})
    folder = tmp_path / "scenes" / request.key()
    folder.mkdir(parents=True)
    # Cut off by a full disk, and hashed like that.
    files = {"scene.mjb": content[:-100], "scene.json": b"{}"}
    for name, part in files.items():
        (folder / name).write_bytes(part)
    sums = {name: hashlib.sha256(part).hexdigest() for name, part in files.items()}
    manifest = {"identity": request.identity(), "sha256": sums}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify(folder, request.key())
    scene: Any = SimpleNamespace(scene_key=request.key(), mjb_path=folder / "scene.mjb")
    with pytest.raises(CompileError, match="built anew"):
        model_io.load_shared(scene)
    assert not verify(folder, request.key())  # so the next start compiles it
