"""The file of a policy: what it keeps, and that reading it runs nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from td3_toys import td3_bc
from toy_env import ToyReach
from trees import assert_same

from vla_gym.errors import WeightsError
from vla_gym_trainers import TD3BC
from vla_gym_trainers.evaluation.trained import load_policy
from vla_gym_trainers.td3.policy import RLTokenPolicy


@pytest.fixture(scope="module")
def model() -> TD3BC:
    return td3_bc(residual_basis=3).learn(64)


def header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(json.loads(file.read(size))["__metadata__"]["rl_token_policy"])


def test_a_policy_comes_back_as_it_was(model: TD3BC, tmp_path: Path) -> None:
    path = tmp_path / "policy"  # of any name
    model.policy.save(path)
    again = load_policy(path)
    assert again.config == model.config and again.guarded_tasks == ()
    obs = ToyReach().reset(seed=3)[0]
    np.testing.assert_array_equal(again.predict(obs)[0], model.predict(obs)[0])
    assert_same(again.state_dict(), model.policy.state_dict())


def test_a_full_disk_leaves_the_policy_of_before(model, tmp_path, monkeypatch):
    path = tmp_path / "policy.safetensors"
    model.policy.save(path)

    def write_bytes(path: Path, content: bytes) -> None:
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="No space left"):
        model.policy.save(path)
    assert load_policy(path).config == model.config
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "change",
    [{"format": 99}, {"chunk_len": 10**12}, {"chunk_len": 3}, {"config": {"unknown": 1}}],
)
def test_what_does_not_fit_is_one_clear_error(model, tmp_path, change):
    path = tmp_path / "policy.safetensors"
    model.policy.save(path)
    text = json.dumps({**header(path), **change})
    save_file(load_file(path), path, {"rl_token_policy": text})
    with pytest.raises(WeightsError, match="its header|does not fit"):
        RLTokenPolicy.load(path)


def test_other_files_are_refused(model: TD3BC, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    model.policy.save(path)
    weights = load_file(path)
    save_file(weights, path)
    with pytest.raises(WeightsError, match="is no policy of TD3"):
        RLTokenPolicy.load(path)
    model.policy.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="missing or damaged"):
        RLTokenPolicy.load(path)
    model.policy.save(path)
    text = json.dumps(header(path))
    weights["actor.head.bias"] = weights["actor.head.bias"] * float("nan")
    save_file(weights, path, {"rl_token_policy": text})
    with pytest.raises(WeightsError, match="not finite"):
        RLTokenPolicy.load(path)
