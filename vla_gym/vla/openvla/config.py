"""What an OpenVLA checkpoint's config.json and shapes say about the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from vla_gym.errors import WeightsError
from vla_gym.vla.files import read_json
from vla_gym.vla.openvla.vision import DINOV2_LARGE, SIGLIP_SO400M, ViTConfig

# Heads cannot be read from shapes. timm's names of the towers -> heads.
_HEADS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": DINOV2_LARGE.num_heads,
    "vit_so400m_patch14_siglip_224": SIGLIP_SO400M.num_heads,
}


def _llama(text_config: Mapping[str, Any]) -> LlamaConfig:
    """Return Llama's configuration; what the checkpoint leaves out has LlamaConfig's defaults.

    Published checkpoints name vocabulary and padding alone. So rms_norm_eps is LlamaConfig's
    1e-6, with which OpenVLA was trained, not Llama 2's own 1e-5. The defaults are written out
    here: they are part of the checkpoints' format.
    """
    values: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "vocab_size": 32064,
        "pad_token_id": 32000,
    }
    # What else text_config says (dtype, version) is about the file, not the network.
    values |= {name: text_config[name] for name in values if name in text_config}
    theta = text_config.get("rope_theta", 10000.0)
    return LlamaConfig(
        **values,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class OpenVLAConfig:
    """Sizes of the network; the defaults are those of the published 7B checkpoints.

    Attributes:
        towers: DINOv2 and SigLIP.
        image_size: Side of the towers' images in pixels.
        text: Of the Llama.
        pad_to_multiple_of: By how much the vocabulary was padded, so that action ids end before it.
    """

    towers: tuple[ViTConfig, ViTConfig] = (DINOV2_LARGE, SIGLIP_SO400M)
    image_size: int = 224
    text: LlamaConfig = field(default_factory=lambda: _llama({}))
    pad_to_multiple_of: int = 64

    @property
    def num_patches(self) -> int:
        """Patch tokens of one view."""
        return self.towers[0].num_patches

    @property
    def action_vocab_end(self) -> int:
        """One more than the highest action id (32000)."""
        return int(self.text.vocab_size) - self.pad_to_multiple_of

    @classmethod
    def from_checkpoint(cls, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> OpenVLAConfig:
        """Read a checkpoint's configuration.

        Args:
            folder: With config.json.
            shapes: Of the checkpoint's tensors, by name.

        Raises:
            WeightsError: If it is no OpenVLA with both vision towers, or heads are unknown.
        """
        file = folder / "config.json"
        config = read_json(file)
        fused = config.get("use_fused_vision_backbone", True)
        if config.get("model_type") != "openvla" or not fused:
            raise WeightsError(
                f"Expected an OpenVLA with two vision towers in {file} (model_type 'openvla', "
                f"use_fused_vision_backbone true), got {config.get('model_type')!r} and {fused}."
            )
        names = config.get("timm_model_ids") or list(_HEADS)
        heads = config.get("_tiny_vit_num_heads") or [_HEADS.get(name) for name in names]
        if len(heads) != 2 or None in heads:
            raise WeightsError(
                f"Expected timm_model_ids of {' and '.join(_HEADS)} in {file}, got {names}."
            )
        prefixes = ("vision_backbone.featurizer.", "vision_backbone.fused_featurizer.")
        towers = tuple(
            ViTConfig.from_shapes(shapes, prefix, count)
            for prefix, count in zip(prefixes, heads, strict=True)
        )
        sizes = set(config.get("image_sizes", [224, 224]))
        patches = {tower.num_patches * tower.patch_size**2 for tower in towers}
        if len(sizes) != 1 or patches != {size**2 for size in sizes}:
            raise WeightsError(
                f"Expected both vision towers on images of one size, got image_sizes "
                f"{sorted(sizes)} in {file} and position embeddings of "
                f"{[tower.num_patches for tower in towers]} patches."
            )
        return cls(
            towers=(towers[0], towers[1]),
            image_size=sizes.pop(),
            text=_llama(config.get("text_config", {})),
            pad_to_multiple_of=config.get("pad_to_multiple_of", 64),
        )
