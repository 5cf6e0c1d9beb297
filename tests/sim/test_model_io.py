"""Models of a process: shared while they are used, kept within bounds when they are not."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mujoco
import pytest

from vla_gym.sim import model_io
from vla_gym.suites.libero import TaskModel


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
