"""Files of published checkpoints and their data statistics: what is read, what is refused."""

import json
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from vla_gym import memory
from vla_gym.errors import ConfigError, NotEnoughMemoryError, WeightsError
from vla_gym.vla import checkpoint_files
from vla_gym.vla.checkpoint_files import Checkpoint, find_file
from vla_gym.vla.load_weights import load_into
from vla_gym.vla.statistics import Normalizer, choose_statistics, read_statistics


def network(device=None):
    with torch.device(device or "cpu"):
        net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        net.register_buffer("steps", torch.zeros(2, dtype=torch.long))
    return net


def write_shards(folder, tensors):
    names = sorted(tensors)
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        safetensors.torch.save_file(part, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return index


def test_shards_into_a_module_on_the_meta_device(tmp_path):
    source = network()
    source.steps += 7
    write_shards(tmp_path, source.state_dict())
    target = network("meta")
    load_into(target, Checkpoint(tmp_path), dtype=torch.bfloat16, keep_float32=["1."])
    assert target[0].weight.dtype == torch.bfloat16 and target[1].weight.dtype == torch.float32
    assert target.steps.tolist() == [7, 7]
    assert torch.equal(target[0].weight, source[0].weight.bfloat16())
    load_into(target, Checkpoint(tmp_path))
    assert torch.equal(target[0].weight, source[0].weight)


def test_safetensors_come_before_pickles(tmp_path):
    torch.save(network().state_dict(), tmp_path / "old.pt")
    assert checkpoint_files.weight_files(tmp_path)[0].name == "old.pt"
    torch.save(network().state_dict(), tmp_path / "pytorch_model.bin")
    assert checkpoint_files.weight_files(tmp_path)[0].name == "pytorch_model.bin"
    safetensors.torch.save_file(network().state_dict(), tmp_path / "model.safetensors")
    assert checkpoint_files.weight_files(tmp_path)[0].name == "model.safetensors"


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"state_dict": x}])
def test_prefix_of_distributed_training(tmp_path, wrap):
    source = network()
    state = {f"module.{name}": value for name, value in source.state_dict().items()}
    torch.save(wrap(state), tmp_path / "head.pt")
    target = network("meta")
    load_into(target, Checkpoint(tmp_path / "head.pt"))
    assert torch.equal(target[0].bias, source[0].bias)


def test_one_error_lists_every_key(tmp_path):
    state = network().state_dict()
    state["0.weight"] = torch.zeros(4, 5)
    state["more.weight"] = torch.zeros(1)
    state["head.weight"] = torch.zeros(1)
    del state["1.bias"]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    given = {"head.weight": None}

    def load():
        load_into(network("meta"), Checkpoint(tmp_path), rename=lambda name: given.get(name, name))

    with pytest.raises(WeightsError) as caught:
        load()
    assert "1 missing: 1.bias" in str(caught.value)
    assert "1 unexpected: more.weight;" in str(caught.value)
    assert "0.weight (4, 5) instead of (4, 3)" in str(caught.value)
    given |= {"more.weight": None, "0.weight": None}
    with pytest.raises(WeightsError, match=r"2 missing: 0\.weight, 1\.bias\. "):
        load()


class Evil:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return (os.mkdir, (str(self.folder),))


def test_pickles_are_not_run(tmp_path):
    with (tmp_path / "head.pt").open("wb") as stream:
        pickle.dump({"weight": Evil(tmp_path / "run")}, stream, protocol=2)
    with pytest.raises(WeightsError, match="tensors and nothing else"):
        Checkpoint(tmp_path)
    assert not (tmp_path / "run").exists()
    for value in ({"weight": torch.zeros(1), "step": 3}, {0: torch.zeros(1)}):
        torch.save(value, tmp_path / "head.pt")
        with pytest.raises(WeightsError, match="dictionary of tensors"):
            Checkpoint(tmp_path)


def test_damaged_files(tmp_path):
    with pytest.raises(WeightsError, match="No weights in"):
        Checkpoint(tmp_path)
    index = write_shards(tmp_path, network().state_dict())
    shard = tmp_path / "model-00001-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:20])
    with pytest.raises(WeightsError, match="Cannot read weights from .*00001"):
        Checkpoint(tmp_path)
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(WeightsError, match="git lfs pull"):
        Checkpoint(tmp_path)
    shard.unlink()
    with pytest.raises(WeightsError, match="lacks model-00001"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(WeightsError, match="outside"):
        Checkpoint(tmp_path)


def test_find_file(tmp_path):
    assert find_file(tmp_path, "action_head", "checkpoint") is None
    (tmp_path / "action_head--50_checkpoint.pt").touch()
    assert find_file(tmp_path, "action_head", "checkpoint").name == "action_head--50_checkpoint.pt"
    (tmp_path / "action_head--60_checkpoint.pt").touch()
    with pytest.raises(WeightsError, match="action_head--50.*action_head--60"):
        find_file(tmp_path, "action_head", "checkpoint")


def test_too_little_memory_is_said_before_anything_is_read(tmp_path, monkeypatch):
    assert memory.free_memory("cpu") > 1e6
    safetensors.torch.save_file(network().state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr(memory, "free_memory", lambda _: 40)
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("read"))
    with pytest.raises(NotEnoughMemoryError, match=r"0\.0 GB on cpu"):
        load_into(network("meta"), Checkpoint(tmp_path), dtype=torch.float32)


STATISTICS = {
    "q01": [-1.0, 0.0, 0.0],
    "q99": [3.0, 2.0, 1.0],
    "min": [-2.0, 0.0, 0.0],
    "max": [4.0, 8.0, 1.0],
    "mean": [1.0, 2.0, 0.5],
    "std": [2.0, 4.0, 0.5],
    "mask": [True, True, False],
}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("q99", [0.5, 1.0, 0.7]), ("min_max", [1 / 3, -0.5, 0.7]), ("mean_std", [0.5, 0.0, 0.7])],
)
def test_normalise_by_hand_and_back(mode, expected):
    values = torch.tensor([[2.0, 2.0, 0.7]])
    normalizer = Normalizer(STATISTICS, mode)
    torch.testing.assert_close(normalizer.normalize(values), torch.tensor([expected]))
    torch.testing.assert_close(normalizer.unnormalize(torch.tensor([expected])), values)


def test_epsilon_mask_and_clipping():
    same = {"q01": [0.0, -1.0], "q99": [0.0, 1.0]}
    x = torch.tensor([5.0, 9.0])
    clipped = Normalizer(same, epsilon=1e-8, clip=True)
    assert clipped.normalize(x).tolist() == [1.0, 1.0]
    assert torch.isfinite(Normalizer(same, epsilon=1e-8).normalize(x)).all()
    assert Normalizer(same | {"mask": [False, True]}).normalize(x).tolist() == [5.0, 9.0]


def test_wrong_statistics():
    with pytest.raises(ConfigError, match="q99, min_max, mean_std"):
        Normalizer(STATISTICS, "bounds")
    with pytest.raises(WeightsError, match="takes q01 and q99, the statistics have mean, std"):
        Normalizer({"mean": [0.0], "std": [1.0]})
    with pytest.raises(WeightsError, match="sizes 3 and 3 and a mask of size 2"):
        Normalizer(STATISTICS | {"mask": [True, False]})
    with pytest.raises(ConfigError, match=r"\(\.\.\., 3\)"):
        Normalizer(STATISTICS).normalize(torch.zeros(2))


def test_choosing_a_data_set(tmp_path):
    stats = {"libero_goal_no_noops": {"action": STATISTICS}, "bridge": {}}
    (tmp_path / "config.json").write_text(json.dumps({"norm_stats": stats}))
    assert read_statistics(tmp_path) == stats
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"only": {}}))
    assert choose_statistics(read_statistics(tmp_path), None, "x") == {}
    assert choose_statistics(stats, "libero_goal", "x") == {"action": STATISTICS}
    with pytest.raises(ConfigError, match="'bridg'.*bridge, libero_goal_no_noops"):
        choose_statistics(stats, "bridg", "x")
    with pytest.raises(ConfigError, match="several data sets"):
        choose_statistics(stats, None, "x")
    (tmp_path / "dataset_statistics.json").write_text("[1")
    with pytest.raises(WeightsError, match="dataset_statistics"):
        read_statistics(tmp_path)
    (tmp_path / "dataset_statistics.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="no statistics"):
        read_statistics(tmp_path)


def test_statistics_do_not_lose_precision():
    rng = np.random.default_rng(0)
    low, high = -rng.uniform(0.1, 1, 7), rng.uniform(0.1, 1, 7)
    x = rng.uniform(-1, 1, (5, 7))
    got = Normalizer({"q01": low, "q99": high}).unnormalize(torch.from_numpy(x).float())
    np.testing.assert_allclose(got, 0.5 * (x + 1) * (high - low) + low, atol=2e-7)
