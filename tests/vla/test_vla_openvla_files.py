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


def published_shapes():
    """Names and shapes of the published 7B checkpoints, from the tiny one's names."""
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    sizes = {"fused_featurizer": (1152, 4304, 27), "featurizer": (1024, 4096, 24)}
    hidden, inner, fused = 4096, 11008, 1024 + 1152
    shapes = {}
    for name in index:
        if name.startswith("projector."):
            rows, columns = {
                "fc1": (4 * fused, fused),
                "fc2": (hidden, 4 * fused),
                "fc3": (hidden, hidden),
            }[name.split(".")[1]]
            shapes[name] = (rows, columns) if name.endswith("weight") else (rows,)
        elif name.startswith("language_model."):
            matrix = {
                "embed_tokens": (32064, hidden),
                "lm_head": (32064, hidden),
                "gate_proj": (inner, hidden),
                "up_proj": (inner, hidden),
                "down_proj": (hidden, inner),
            }.get(name.split(".")[-2], (hidden, hidden))
            shape = (hidden,) if "norm" in name else matrix
            for layer in range(32) if ".layers.0." in name else ():
                shapes[name.replace(".layers.0.", f".layers.{layer}.")] = shape
            if ".layers." not in name:
                shapes[name] = shape
        else:
            width, mlp, depth = sizes[name.split(".")[1]]
            shape = {
                "cls_token": (1, 1, width),
                "reg_token": (1, 4, width),
                "pos_embed": (1, 256, width),
                "latent": (1, 1, width),
                "proj.weight": (width, width),
                "q.weight": (width, width),
                "kv.weight": (2 * width, width),
                "kv.bias": (2 * width,),
                "qkv.weight": (3 * width, width),
                "qkv.bias": (3 * width,),
                "fc1.weight": (mlp, width),
                "fc1.bias": (mlp,),
                "fc2.weight": (width, mlp),
            }
            found = shape.get(name.split(".")[-1]) or shape.get(".".join(name.split(".")[-2:]))
            if "patch_embed.proj.weight" in name:
                found = (width, 3, 14, 14)
            for block in range(depth) if ".blocks.0." in name else ():
                shapes[name.replace(".blocks.0.", f".blocks.{block}.")] = found or (width,)
            if ".blocks." not in name:
                shapes[name] = found or (width,)
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
    del config["_tiny_vit_num_heads"]
    config |= {
        "image_sizes": [224, 224],
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = OpenVLAConfig.from_checkpoint(tmp_path, published_shapes())
    assert found.towers == OpenVLAConfig().towers and found.image_size == 224
    assert found.text.to_dict() == OpenVLAConfig().text.to_dict()
    assert found.text.rms_norm_eps == 1e-6  # not Llama 2's own, which the reference would notice
    assert (found.towers[0].num_patches, found.action_vocab_end) == (256, 32000)


@pytest.mark.parametrize("number", ["x", "1000000"])
def test_a_name_does_not_decide_how_many_blocks_are_built(number):
    checkpoint = Checkpoint(CHECKPOINT)
    checkpoint.shapes[name := f"vision_backbone.featurizer.blocks.{number}.gamma"] = (1,)
    config = OpenVLAConfig.from_checkpoint(CHECKPOINT, checkpoint.shapes)
    with pytest.raises(WeightsError, match=f"1 unexpected: {name}"):
        OpenVLAModel.from_checkpoint(checkpoint, config)


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
    for changes, message in (
        ({"model_type": "llava"}, "got 'llava'"),
        ({"use_fused_vision_backbone": False}, "two vision towers"),
        ({"_tiny_vit_num_heads": None}, "Expected timm_model_ids"),
        ({"image_sizes": [224, 224]}, "images of one size"),
    ):
        broken = make_checkpoint(tmp_path / f"broken{len(str(changes))}", **changes)
        with pytest.raises(WeightsError, match=message):
            OpenVLAOFTBackend.from_pretrained(broken)
