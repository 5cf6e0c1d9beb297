"""pi0 (arXiv 2410.24164) as a backend: transformers' own network, lerobot's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch.nn import functional as F
from transformers import PI0Config, PI0ForConditionalGeneration

from vla_gym.errors import WeightsError
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.flow.backend import FlowBackend, FlowInputs, Velocity
from vla_gym.vla.flow.lerobot_files import LeRobotPolicyFiles
from vla_gym.vla.load_weights import described_by, fill_buffers

# What differs between the variants of Gemma that checkpoints name; the rest is PI0Config's default.
_GEMMA = {
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384},
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
}
# What config.json and the network's configuration call by the same name.
_KEPT = (
    "chunk_size",
    "max_state_dim",
    "max_action_dim",
    "min_period",
    "max_period",
    "num_inference_steps",
)
# Beginnings of lerobot's names -> transformers' names; None is never used.
_RENAMED: tuple[tuple[str, str | None], ...] = (
    ("paligemma_with_expert.paligemma.model.", "model.vlm."),
    ("paligemma_with_expert.paligemma.lm_head.", "model.vlm.language_model.embed_tokens."),
    ("paligemma_with_expert.gemma_expert.model.", "model.dit."),
    ("paligemma_with_expert.gemma_expert.lm_head.", None),
    ("action_out_proj.", "action_out_proj."),
    ("", "embed_action_time."),  # projections of state, actions and time
)


class Pi0Backend(FlowBackend):
    """:class:`~vla_gym.vla.base.FrozenVLA` over transformers' PI0ForConditionalGeneration."""

    centred_padding = True
    policy_type = "pi0"
    steps_key = "num_inference_steps"
    default_backbone = "google/paligemma-3b-pt-224"
    backbone_files = ("tokenizer.json",)
    float32_parts = ("embed_action_time", "action_out_proj")
    #: Class of the network, made from what :func:`make_config` returns.
    network: type[PI0ForConditionalGeneration] = PI0ForConditionalGeneration
    model: Any  # of that class, whose annotations are narrower than what it takes

    def set_up(self, compile: bool) -> None:
        """See :meth:`FlowBackend.set_up`."""
        self._read_sizes()
        if compile:
            self.model.model.vlm.vision_tower.compile(dynamic=False)
            self.model.model.dit.compile(dynamic=False)

    def _read_sizes(self) -> None:
        vision = self.model.config.vlm_config.vision_config
        self.pixel_size = vision.image_size, vision.image_size
        self._image_tokens = (vision.image_size // vision.patch_size) ** 2

    @classmethod
    def make_network(
        cls,
        files: LeRobotPolicyFiles,
        backbone: Path,  # noqa: ARG003
        checkpoint: Checkpoint,
    ) -> tuple[Any, Callable[[str], str | None]]:
        """See :meth:`FlowBackend.make_network`."""
        with described_by(files.folder), torch.device("meta"):
            model: Any = cls.network(make_config(files))
        # The expert reads no words; its table would be a tenth of all parameters.
        model.model.dit.embed_tokens = None
        fill_buffers(model)
        nested = any("vision_tower.vision_model." in name for name in model.state_dict())
        tied = any(name.endswith("embed_tokens.weight") for name in checkpoint.shapes)
        return model, partial(_rename, nested=nested, tied=tied)

    def flow(self, inputs: FlowInputs) -> Velocity:
        """Run PaliGemma once; see :meth:`FlowBackend.flow`.

        As ``sample_actions`` of transformers, whose loop has no gradients.
        """
        model = self.model
        cache, mask = self._prefill(inputs)
        length = cache.get_seq_length()
        dtype = model.model.dit.norm.weight.dtype

        def velocity(x: torch.Tensor, time: float) -> tuple[torch.Tensor, torch.Tensor]:
            # pi0 counts time from the action (0) to noise (1).
            at = x.new_full((len(x),), 1.0 - time)
            # Noise and velocities add up in float32, whatever the layers between run in.
            embedded = model.embed_action_time(inputs.state, x, at).to(dtype)
            out = model.model(action_embeds=embedded, attention_mask=mask, cache=cache)
            cache.crop(length - cache.get_seq_length())  # the next step sees the VLM alone
            hidden = out.last_hidden_state[:, -self.horizon :].float()
            return hidden, -model.action_out_proj(hidden)

        return velocity

    def _prefill(self, inputs: FlowInputs) -> tuple[Any, torch.Tensor]:
        """Return PaliGemma's keys and values of images and prompt, and their mask (B, P) int64."""
        pixels, tokens, token_mask, _ = inputs
        model, count = self.model, self._image_tokens * pixels.shape[1]
        placeholders = tokens.new_full((len(tokens), count), model.config.vlm_config.image_token_id)
        mask = F.pad(token_mask.long(), (count, 0), value=1)
        embedded = model.model.embed_prefix(
            torch.cat([placeholders, tokens], dim=1),
            pixels.to(model.model.vlm.language_model.norm.weight.dtype),
            token_mask.new_ones(pixels.shape[:2]),
        )
        cache = model.model.vlm(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(embedded[..., 0]),
            use_cache=True,
        ).cache
        return cache, mask


def make_config(files: LeRobotPolicyFiles) -> PI0Config:
    """Return the network's configuration that a policy's config.json stands for.

    ``paligemma_variant`` and ``action_expert_variant`` are names (``"gemma_2b"``,
    ``"gemma_300m"``), or tables of sizes for networks of other sizes, with ``vision_config`` then.

    Raises:
        WeightsError: If a variant is unknown.
    """
    config = files.config
    usual: Any = PI0Config()

    def sizes(key: str, part: Any) -> dict[str, Any]:
        variant = getattr(config, key)
        if isinstance(variant, str) and variant not in _GEMMA:
            raise WeightsError(
                f"Checkpoint {files.folder} has {key} {variant!r}; known: {', '.join(_GEMMA)}."
            )
        chosen = _GEMMA[variant] if isinstance(variant, str) else to_builtins(variant)
        return {**part.to_dict(), **chosen}

    text = sizes("paligemma_variant", usual.vlm_config.text_config)
    vision = {**usual.vlm_config.vision_config.to_dict(), **to_builtins(config.vision_config)}
    vision["image_size"] = (config.image_resolution or (224, 224))[0]
    return PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": vision,
            "projection_dim": text["hidden_size"],
            "image_token_id": text["vocab_size"],
        },
        dit_config=sizes("action_expert_variant", usual.dit_config),
        **{key: getattr(config, key) for key in _KEPT},
    )


def _rename(name: str, nested: bool, tied: bool) -> str | None:
    """Return transformers' name of a checkpoint's tensor; None for what is never used.

    Args:
        name: The checkpoint's.
        nested: Whether the vision tower's names have a ``vision_model`` in this transformers.
        tied: Whether the checkpoint has the words' embeddings, so that lm_head is a copy.
    """
    name = name.replace("_orig_mod.", "")  # saved from a compiled policy
    if re.match(r"(un)?normalize_(in|out|tar)", name):
        return None  # statistics, in checkpoints from before the processors
    name = name.removeprefix("model.")
    for old, new in _RENAMED:
        if name.startswith(old):
            if new is None or (tied and ".paligemma.lm_head." in name):
                return None
            name = new + name.removeprefix(old)
            break
    if not nested:
        name = name.replace("vision_tower.vision_model.", "vision_tower.")
    return name
