"""Checkpoints from elsewhere: configurations, statistics, adapters, weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spoilt_files import refused, spoil
from vla_checkpoints import CHECKPOINTS, copied

from vla_gym.rl_token import load_rl_token
from vla_gym.vla import load
from vla_gym.vla.files import WEIGHTS_ROOT
from vla_gym.vla.lora import LoraAdapters, LoraSettings

LONG = 5000 * "a"
DEEP = json.loads("[" * 200 + "]" * 200)


C, S, V = "config.json", "dataset_statistics.json", "vlm_pretrained/config.json"
P = "vlm_pretrained/preprocessor_config.json"
PRE = "policy_preprocessor.json"
CASES: list[tuple[str, str, str, Any]] = [
    ("openvla-oft", C, "text_config", []),
    ("openvla-oft", C, "text_config.num_attention_heads", 0),
    ("openvla-oft", C, "text_config.num_hidden_layers", 100_000),
    ("openvla-oft", C, "text_config.hidden_size", 10**12),
    ("openvla-oft", C, "text_config.hidden_act", "nosuch"),
    ("openvla-oft", C, "text_config.pad_token_id", 10**6),
    ("openvla-oft", C, "image_sizes", [10**9, 10**9]),
    ("openvla-oft", C, "pad_to_multiple_of", 10**5),
    ("openvla-oft", C, "text_config", DEEP),
    ("openvla-oft", "model.safetensors.index.json", "weight_map", {"a": LONG}),
    ("qwen-oft", S, "franka.action.q01", ["a"] * 7),
    ("qwen-oft", V, "model_type", ["qwen3_vl"]),
    ("qwen-oft", V, "text_config.num_hidden_layers", 100_000),
    ("qwen-oft", V, "vision_config.num_heads", 0),
    ("qwen-oft", P, "patch_size", 0),
    ("qwen-oft", P, "image_std", [1, 2]),
    # pi05 and smolvla are read by what reads pi0.
    ("pi0", C, "input_features", []),
    ("pi0", C, "input_features", {"observation.images.image": {"type": "VISUAL", "shape": 5}}),
    ("pi0", C, "max_state_dim", 3),
    ("pi05", C, "chunk_size", 10**9),
    ("pi0", C, "num_inference_steps", 10**9),
    ("pi0", C, "paligemma_variant.num_hidden_layers", 100_000),
    ("pi0", C, "vision_config.patch_size", 0),
    ("pi0", PRE, "steps", [5]),
    ("smolvla", C, "num_steps", 0),
    ("smolvla", C, "num_vlm_layers", 100_000),
    ("smolvla", C, "resize_imgs_with_padding", [0, 0]),
    ("smolvla", "vlm/config.json", "text_config.num_hidden_layers", 100_000),
    ("mini", C, "hidden_size", 10**12),
    ("mini", C, "num_layers", 100_000),
    ("mini", C, "num_heads", 7),
    ("mini", C, "vocabulary", [1, 2]),
    ("mini", C, "horizon", 10**9),
    ("mini", C, "proprio_std", [1.0]),
]


@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
@pytest.mark.parametrize(
    ("name", "file", "place", "value"),
    CASES,
    ids=[f"{name}-{place}-{str(value)[:20]}" for name, _, place, value in CASES],
)
def test_a_spoilt_configuration_is_one_clear_error(
    name: str, file: str, place: str, value: Any, tmp_path: Path
) -> None:
    folder = copied(CHECKPOINTS[name], tmp_path / "copy")
    spoil(folder / file, place, value)
    refused(lambda: load(f"{name}:{folder}"), folder)


def test_a_file_that_is_no_object_is_one_clear_error(tmp_path: Path) -> None:
    for name, source in CHECKPOINTS.items():
        folder = copied(source, tmp_path / name)
        for file in (C, S):
            if (folder / file).is_file():
                (folder / file).write_text("[]")
        refused(lambda: load(f"{name}:{folder}"), folder)  # noqa: B023


def mini(tmp_path: Path, change: Any) -> Path:
    folder = copied(CHECKPOINTS["mini"], tmp_path / "mini")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: change(t).contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.to(torch.int8), "torch.int8: expected torch.float32"),
        (lambda t: torch.full_like(t, torch.nan), "not finite"),
    ],
)
def test_weights_of_another_kind_are_refused(change: Any, expected: str, tmp_path: Path) -> None:
    folder = mini(tmp_path, change)
    refused(lambda: load(f"mini:{folder}"), folder, expected)


ADAPTERS = [
    ("r", 10**9),
    ("peft_type", "EVIL"),
    ("target_modules", 5),
    ("base_model_name_or_path", LONG),
    ("rank_pattern", {"a": 10**9}),
]


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    vla: Any = load(f"mini:{mini(tmp_path, lambda t: t)}")
    LoraAdapters.add(vla, LoraSettings(r=2)).save(tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
@pytest.mark.parametrize(("place", "value"), ADAPTERS, ids=[str(x)[:40] for x in ADAPTERS])
def test_spoilt_adapters_are_one_clear_error(place: str, value: Any, adapters: Path) -> None:
    spoil(adapters / "adapter_config.json", place, value)
    # A folder of its own: the network that the fixture has changed is not loaded again.
    fresh = mini(adapters.parent / "again", lambda t: t)
    refused(lambda: load(f"mini:{fresh}?adapters={adapters}"), adapters, place)


@pytest.mark.parametrize("value", [torch.full((), torch.nan), torch.ones((), dtype=torch.int8)])
def test_adapters_that_are_not_finite_floats_are_refused(value: Any, adapters: Path) -> None:
    file = adapters / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: value.expand_as(t).contiguous() for n, t in tensors.items()}, file)
    fresh = mini(adapters.parent / "again", lambda t: t)
    refused(lambda: load(f"mini:{fresh}?adapters={adapters}"), adapters, "no finite floats")


@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
@pytest.mark.parametrize(
    ("place", "value"),
    [("dim", 2**24), ("num_heads", 0), ("width", [1])],
)
def test_a_spoilt_rl_token_is_one_clear_error(place: str, value: Any, tmp_path: Path) -> None:
    folder = copied(WEIGHTS_ROOT / "mini-rl-token", tmp_path / "token")
    spoil(folder / C, place, value)
    refused(lambda: load_rl_token(folder), folder)


@pytest.mark.parametrize("spec", [LONG, f"mini:/{LONG}", f"pi0:{LONG}?seed=1", "mini:/\0"])
def test_paths_that_no_file_can_have_are_refused(spec: str) -> None:
    assert len(refused(lambda: load(spec))) < 600
