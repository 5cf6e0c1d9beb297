"""Run directories, checkpoints, caches and packs from elsewhere."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from spoilt_files import refused, spoil

from vla_gym.assets.lite.generate import MANIFEST as PACK_MANIFEST
from vla_gym.assets.lite.generate import read_manifest
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.suites.disk_cache import MANIFEST, verify
from vla_gym_trainers.evaluation.trained import trained_on
from vla_gym_trainers.on_policy.rl_token_actor import SIZES, ActorSizes, RLTokenActor
from vla_gym_trainers.runs.run_dir import Checkpoint, RunDir
from vla_gym_trainers.runs.torch_helpers import load_tensors


@pytest.mark.parametrize(
    "text",
    ["[]", '{"vla": "' + 5000 * "a" + '"}', '{"policy": {}}', '{"hidden_cameras": "agentview"}'],
)
def test_a_bad_configuration_beside_a_policy_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(lambda: trained_on(tmp_path), tmp_path / "config.json", kind=ConfigError)


STATE: dict[str, Any] = {"format": 2, "step": 5, "trainer": {}, "run": {}}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        json.dumps({**STATE, "trainer": [1]}),
        json.dumps({**STATE, "format": None}),
        json.dumps({**STATE, "format": 10**6}),
    ],
)
def test_a_bad_state_of_a_checkpoint_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    refused(lambda: Checkpoint.read(tmp_path), tmp_path, kind=WeightsError)


@pytest.mark.parametrize("text", ["[]", '{"a": "b"}', '{"a": -1}'])
def test_a_checkpoint_with_a_bad_manifest_is_left_out(text: str, tmp_path: Path) -> None:
    with RunDir(tmp_path).new_checkpoint(5, 3) as folder:
        (folder / "a").write_text("x")
    (checkpoint,) = RunDir(tmp_path).checkpoints()
    (manifest,) = (file for file in checkpoint.iterdir() if file.name != "a")
    manifest.write_text(text)
    with pytest.warns(UserWarning, match="no whole checkpoint"):
        assert not RunDir(tmp_path).checkpoints()


@pytest.mark.parametrize("text", ["[]", "{", '{"identity": [], "sha256": 5}'])
def test_a_bad_manifest_of_a_cache_is_a_rebuild(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    assert not verify(tmp_path, "key")
    (tmp_path / PACK_MANIFEST).write_text(text)
    assert read_manifest(tmp_path) is None


@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("token_dim", 2**24),
        ("net_arch", 5),
        ("net_arch", [2**24] * 60),
        ("action_scale", "a"),
        ("memory_size", -1),
    ],
)
def test_a_bad_actor_is_one_clear_error(place: str, value: Any, tmp_path: Path) -> None:
    RLTokenActor(ActorSizes(4, 2, [8], 1.0, 2, 8, [1.0] * 7)).save(tmp_path)
    RLTokenActor.load(tmp_path)
    spoil(tmp_path / SIZES, place, value)
    refused(lambda: RLTokenActor.load(tmp_path), tmp_path)


def test_a_save_of_an_actor_that_fails_leaves_its_sizes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = RLTokenActor(ActorSizes(4, 2, [8], 1.0, 2, 8, [1.0] * 7))
    actor.save(tmp_path)

    def half(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        actor.save(tmp_path)
    assert RLTokenActor.load(tmp_path).sizes == actor.sizes


class MakesFolder:
    """Runs when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_tensors_of_a_checkpoint_execute_nothing(tmp_path: Path) -> None:
    file = tmp_path / "learner.pt"
    file.write_bytes(pickle.dumps({"optimizer": MakesFolder(tmp_path / "made")}, protocol=2))
    with pytest.raises(WeightsError, match="learner.pt is no whole file of tensors"):
        load_tensors(file)
    assert not (tmp_path / "made").exists()
