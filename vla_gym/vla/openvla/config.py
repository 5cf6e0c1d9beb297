"""What an OpenVLA checkpoint's config.json says about the network."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field, structs
from transformers import LlamaConfig

from vla_gym.errors import WeightsError
from vla_gym.outside import ImageSide, Layers, OpenFraction, PositiveFloat, Size
from vla_gym.vla.files import read_json
from vla_gym.vla.load_weights import described_by
from vla_gym.vla.openvla.vision import DINOV2_LARGE, SIGLIP_SO400M, ViTConfig
from vla_gym.vla.tokens import NUM_BINS

# timm's names of the two towers that there are.
_TOWERS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]


class _Text(Struct):
    """Llama's configuration; what the checkpoint leaves out has LlamaConfig's defaults.

    Published checkpoints name vocabulary and padding alone. So rms_norm_eps is LlamaConfig's
    1e-6, with which OpenVLA was trained, not Llama 2's own 1e-5. The defaults are written out
    here: they are part of the checkpoints' format. What else text_config says (dtype, version) is
    about the file, not the network.
    """

    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    max_position_embeddings: Size = 2048
    rms_norm_eps: OpenFraction = 1e-6
    vocab_size: Size = 32064
    pad_token_id: Annotated[int, Meta(ge=0)] | None = 32000
    rope_theta: PositiveFloat = 10000.0
    hidden_act: Literal["silu"] = "silu"


class _File(Struct):
    model_type: str | None = None
    use_fused_vision_backbone: bool = True
    timm_model_ids: list[str] | None = None
    tiny_towers: tuple[ViTConfig, ViTConfig] | None = field(name="_tiny_towers", default=None)
    image_sizes: Annotated[list[ImageSide], Meta(min_length=1)] = field(
        default_factory=lambda: [224, 224]
    )
    text_config: _Text = field(default_factory=_Text)
    pad_to_multiple_of: Annotated[int, Meta(ge=0, le=2**20)] = 64

    def __post_init__(self) -> None:
        """Check that the vocabulary holds the actions' tokens."""
        if self.text_config.vocab_size - self.pad_to_multiple_of < NUM_BINS:
            raise ValueError(
                f"Expected vocab_size {self.text_config.vocab_size} to be pad_to_multiple_of "
                f"{self.pad_to_multiple_of} and {NUM_BINS} actions at least"
            )


def _llama(text: _Text) -> LlamaConfig:
    values = structs.asdict(text)
    theta = values.pop("rope_theta")
    return LlamaConfig(
        **values,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
    )


@dataclasses.dataclass(frozen=True)
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
    text: LlamaConfig = dataclasses.field(default_factory=lambda: _llama(_Text()))
    pad_to_multiple_of: int = 64

    @property
    def action_vocab_end(self) -> int:
        """One more than the highest action id (32000)."""
        return int(self.text.vocab_size) - self.pad_to_multiple_of

    @classmethod
    def from_checkpoint(cls, folder: Path) -> OpenVLAConfig:
        """Read config.json.

        Raises:
            WeightsError: If it is no OpenVLA with both vision towers, or these are unknown.
        """
        file = folder / "config.json"
        config = read_json(file, _File)
        if config.model_type != "openvla" or not config.use_fused_vision_backbone:
            raise WeightsError(
                f"Expected an OpenVLA with two vision towers in {file} (model_type 'openvla', "
                f"use_fused_vision_backbone true), got {config.model_type!r:.80} and "
                f"{config.use_fused_vision_backbone}."
            )
        if config.tiny_towers is None and config.timm_model_ids not in (None, _TOWERS):
            raise WeightsError(
                f"Expected timm_model_ids of {' and '.join(_TOWERS)} in {file}, got "
                f"{config.timm_model_ids}."
            )
        size, *others = set(config.image_sizes)
        if others:
            raise WeightsError(
                "Expected both vision towers on images of one size, got image_sizes "
                f"{config.image_sizes} in {file}."
            )
        first, second = (
            dataclasses.replace(tower, num_patches=(size // tower.patch_size) ** 2)
            for tower in config.tiny_towers or (DINOV2_LARGE, SIGLIP_SO400M)
        )
        with described_by(folder):
            text = _llama(config.text_config)
        return cls((first, second), size, text, config.pad_to_multiple_of)
