"""LoRA on a backend: exact at first, alone in training, saved apart, merged."""

import copy
import json

import pytest
import torch
from mini_vla import random_inputs, small_config
from safetensors import safe_open

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla.lora import LoraAdapters, LoraSettings, count_parameters
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA

HEADS = LoraSettings(r=4, alpha=8, exclude=("action_head",), train_whole=("token_head",))


@pytest.fixture
def vla():
    torch.manual_seed(0)
    return MiniBackend(MiniVLA(small_config()))


def train_a_step(vla, adapters):
    inputs = random_inputs(2)
    tokens = vla.act_tokens(*inputs)[0]
    optimizer = torch.optim.SGD(adapters.parameters(), lr=0.5)
    for _ in range(2):  # A moves in the second step only: B is zero in the first
        optimizer.zero_grad()
        vla.token_log_probs(*inputs, tokens).mean().neg().backward()
        optimizer.step()


def logits(vla):
    with torch.no_grad():
        return vla.token_outputs(*random_inputs(3)).logits


def test_adapters_change_nothing_until_trained_and_then_alone(vla):
    before, weights = logits(vla), copy.deepcopy(vla.model.state_dict())
    adapters = LoraAdapters.add(vla, HEADS)
    assert torch.equal(logits(vla), before)
    train_a_step(vla, adapters)
    assert (logits(vla) - before).abs().max() > 1e-3
    after = {name.replace("base_layer.", ""): p for name, p in vla.model.named_parameters()}
    for name, value in weights.items():
        if not name.startswith("token_head"):
            assert torch.equal(after[name], value), name
    trained = {name.split(".")[0] for name, p in vla.model.named_parameters() if p.requires_grad}
    assert trained == {"stems", "proprio_mlp", "blocks", "token_head"}


def test_counts(vla):
    # r (in + out) each: 2 x proj(48*4*4=768 -> 4*32=128), 11->32, 32->32, and 2 blocks of
    # 4 x 32->32, 32->128, 128->32; the token head of 32 * 1792 + 1792 is trained whole.
    lora = 4 * (2 * (768 + 128) + (11 + 32) + 64 + 2 * (4 * 64 + 2 * 160))
    head = 32 * 1792 + 1792
    whole = count_parameters(vla.model).total
    counts = LoraAdapters.add(vla, HEADS).counts
    assert counts.trainable == lora + head
    assert counts.total == whole + lora + head  # the frozen head is kept beside the trained one
    assert "are trained" in str(counts)


def test_saved_apart_loaded_and_merged(vla, tmp_path):
    plain = copy.deepcopy(vla)
    adapters = LoraAdapters.add(vla, HEADS)
    train_a_step(vla, adapters)
    adapters.save(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in key or "token_head" in key for key in file.keys())  # noqa: SIM118
    assert "/" not in (tmp_path / "adapter_config.json").read_text()

    again = copy.deepcopy(plain)
    loaded = LoraAdapters.load(again, tmp_path)
    assert torch.equal(logits(again), logits(vla))
    assert loaded.counts == adapters.counts

    adapters.merge()
    torch.testing.assert_close(logits(vla), logits(again), atol=1e-5, rtol=0)
    assert vla.model.state_dict().keys() == plain.model.state_dict().keys()
    assert count_parameters(vla.model).trainable == 0
    LoraAdapters.add(vla, HEADS)  # a second round may begin


def test_mistakes_are_named(vla, tmp_path):
    with pytest.raises(ConfigError, match="r: expected"):
        LoraSettings(r=0)
    with pytest.raises(ConfigError, match=r"network in \.model"):
        LoraAdapters.add(object())
    with pytest.raises(ConfigError, match="no module 'value_head'"):
        LoraAdapters.add(vla, LoraSettings(train_whole=("value_head",)))
    with pytest.raises(ConfigError, match="No adapters in MiniVLA"):
        LoraAdapters.add(copy.deepcopy(vla), LoraSettings(target_modules=("nothing",)))
    with pytest.raises(WeightsError, match="adapter_config.json and adapter_model.safe"):
        LoraAdapters.load(vla, tmp_path)
    adapters = LoraAdapters.add(vla, HEADS)
    with pytest.raises(ConfigError, match="adapters already"):
        LoraAdapters.add(vla, HEADS)
    adapters.save(tmp_path)
    torch.manual_seed(0)
    other = MiniBackend(MiniVLA(small_config(num_heads=2, horizon=4)))
    LoraAdapters.load(copy.deepcopy(other), tmp_path)  # heads and queries have no adapters
    deeper = small_config()
    deeper.num_layers = 1
    shallow = MiniBackend(MiniVLA(deeper))
    with pytest.raises(WeightsError, match="do not fit MiniVLA"):
        LoraAdapters.load(shallow, tmp_path)
    assert not any("lora_" in name for name, _ in shallow.model.named_parameters())
    few = MiniBackend(copy.deepcopy(other.model), "mini-few")
    with pytest.raises(WeightsError, match="trained on 'mini', not on 'mini-few'"):
        LoraAdapters.load(few, tmp_path)
    config = tmp_path / "adapter_config.json"
    whole = config.read_text()
    for wrong in ({"target_modules": "("}, {"modules_to_save": ["blocks"]}):
        config.write_text(json.dumps(json.loads(whole) | wrong))
        with pytest.raises(ConfigError, match="No adapters in MiniVLA"):
            LoraAdapters.load(copy.deepcopy(other), tmp_path)
    config.write_text(whole)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightsError, match="damaged"):
        LoraAdapters.load(copy.deepcopy(other), tmp_path)
