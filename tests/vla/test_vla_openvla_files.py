"""OpenVLA's sizes, checkpoint folders, what is wrong with them, and what a chunk costs."""

import json
import math
import re

import pytest
import torch
from openvla_checkpoints import CHECKPOINT, make_checkpoint

from vla_gym import memory
from vla_gym.errors import ConfigError, NotEnoughMemoryError, WeightsError
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.openvla.autoregressive import OpenVLABackend
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.model import L1ActionHead, OpenVLAModel, proprio_projector
from vla_gym.vla.openvla.oft import OpenVLAOFTBackend

# ---------------------------------------------------------------------- sizes and files


#: Sizes in the tiny checkpoint, and what they are in the published ones.
FULL_SIZE = {
    **{16: 4096, 44: 11008, 56: 2176, 224: 4 * 2176},  # language model and projector
    **{32: 1024, 96: 3 * 1024, 128: 4096},  # DINOv2
    **{24: 1152, 48: 2 * 1152, 72: 3 * 1152, 89: 4304},  # SigLIP
}
DEPTHS = {"vision_backbone.featurizer": 24, "vision_backbone.fused_featurizer": 27}
DEPTHS["language_model.model"] = 32


def published_shapes():
    """Names and shapes of the published 7B checkpoints, from those of the tiny one."""
    shapes = {}
    for name, tiny in Checkpoint(CHECKPOINT).shapes.items():
        shape = tuple(FULL_SIZE.get(size, size) for size in tiny)
        if name.endswith(".pos_embed"):
            shape = (1, 256, shape[2])
        if block := re.fullmatch(r"(.*)(\.blocks|\.layers)\.0(\..*)", name):
            part, blocks, rest = block.groups()
            shapes |= {f"{part}{blocks}.{i}{rest}": shape for i in range(DEPTHS[part])}
        elif not re.search(r"\.(blocks|layers)\.", name):
            shapes[name] = shape
    return shapes


def test_the_full_size_network_has_the_published_names_and_shapes():
    with torch.device("meta"):
        model = OpenVLAModel(OpenVLAConfig())
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    published = published_shapes()
    unused = r"vision_backbone\.(featurizer\.blocks\.23|fused_featurizer\.blocks\.26)\..*"
    unused += r"|vision_backbone\.\w+\.(norm|attn_pool)\..*"
    assert found == {n: s for n, s in published.items() if not re.fullmatch(unused, n)}
    assert sum(math.prod(shape) for shape in published.values()) == 7_541_237_184
    with torch.device("meta"):
        head, projector = L1ActionHead(4096), proprio_projector(4096)
    assert head.model.fc1.weight.shape == (4096, 28672)
    for module, file in ((head, "action_head"), (projector, "proprio_projector")):
        tiny = Checkpoint(CHECKPOINT / f"{file}--50000_checkpoint.pt")
        assert set(module.state_dict()) == set(tiny.shapes)


def test_published_config_gives_the_full_size(tmp_path):
    """As published: text_config names the vocabulary alone."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    del config["_tiny_towers"]
    config |= {
        "image_sizes": [224, 224],
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = OpenVLAConfig.from_checkpoint(tmp_path)
    assert found.towers == OpenVLAConfig().towers and found.image_size == 224
    assert found.text.to_dict() == OpenVLAConfig().text.to_dict()
    assert found.text.rms_norm_eps == 1e-6  # not Llama 2's own, which the reference would notice
    assert (found.towers[0].num_patches, found.action_vocab_end) == (256, 32000)


@pytest.mark.parametrize("quantity", ["action", "proprio"])
def test_statistics_of_another_size_are_refused(tmp_path, quantity):
    folder = make_checkpoint(tmp_path / "short")
    file = folder / "dataset_statistics.json"
    statistics = json.loads(file.read_text())
    statistics["libero_goal_no_noops"][quantity] = {"q01": [0.0], "q99": [1.0]}
    file.unlink()
    file.write_text(json.dumps(statistics))
    with pytest.raises(
        WeightsError, match=f"short: expected statistics of . numbers of {quantity}, got 1"
    ):
        OpenVLAOFTBackend.from_pretrained(folder)


def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "whole")
    for options, message in (
        ({"unnorm_key": "bridge_orig"}, "no statistics 'bridge_orig'.*libero_goal_no_noops"),
        ({"head": "diffusion"}, "no head 'diffusion', but l1 and token"),
        ({"num_views": 3}, "num_views.*: expected 1 or 2, got 3"),
        ({"views": 1}, "does not take these options: views.*num_views"),
    ):
        with pytest.raises(ConfigError, match=message):
            OpenVLAOFTBackend.from_pretrained(folder, **options)
    OpenVLAOFTBackend.from_pretrained(folder, unnorm_key="libero_goal")  # with _no_noops behind it
    with pytest.raises(ConfigError, match="head 'l1', but token"):
        bare = make_checkpoint(tmp_path / "bare", without=("action_head",))
        OpenVLAOFTBackend.from_pretrained(bare, head="l1")
    for backend in (OpenVLABackend, OpenVLAOFTBackend):
        with pytest.raises(WeightsError, match="Expected the folder"):
            backend.from_pretrained(folder / "config.json")
    (folder / "vision_backbone--50000_checkpoint.pt").write_bytes(b"")
    with pytest.raises(WeightsError, match="vision_backbone--50000.*FiLM"):
        OpenVLAOFTBackend.from_pretrained(folder)
    (folder / "vision_backbone--50000_checkpoint.pt").unlink()
    (folder / "action_head--100000_checkpoint.pt").write_bytes(b"")
    with pytest.raises(WeightsError, match="head--100000.*head--50000.*remove those of"):
        OpenVLAOFTBackend.from_pretrained(folder)
    (folder / "action_head--100000_checkpoint.pt").unlink()
    monkeypatch.setattr(memory, "free_memory", lambda _: 10**6)
    with pytest.raises(NotEnoughMemoryError, match="MB|GB"):
        OpenVLAOFTBackend.from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match="copy tokenizer.json"):
        OpenVLAOFTBackend.from_pretrained(folder)
    towers = json.loads((CHECKPOINT / "config.json").read_text())["_tiny_towers"]
    uneven = [tower | {"num_heads": 5} for tower in towers]
    for changes, message in (
        ({"_tiny_towers": uneven}, "divisible by num_heads, got 32 and 5"),
        ({"model_type": "llava"}, "got 'llava'"),
        ({"use_fused_vision_backbone": False}, "two vision towers"),
        ({"_tiny_towers": None}, "Expected timm_model_ids"),
        ({"image_sizes": [56, 224]}, "images of one size"),
        ({"image_sizes": [224, 224]}, r"pos_embed \(1, 16, 32\) instead of \(1, 256, 32\)"),
    ):
        broken = make_checkpoint(tmp_path / f"broken{len(str(changes))}", **changes)
        with pytest.raises(WeightsError, match=message):
            OpenVLAOFTBackend.from_pretrained(broken)
