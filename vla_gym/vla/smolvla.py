"""SmolVLA (arXiv 2506.01844) as a backend, from lerobot's checkpoints."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from vla_gym.errors import WeightsError
from vla_gym.vla.base import ACTION_SIZE, PROPRIO_SIZE
from vla_gym.vla.checkpoint_files import Checkpoint, load_into
from vla_gym.vla.flow import FlowBackend, FlowOptions, FlowOutput
from vla_gym.vla.lerobot_files import LeRobotPolicyFiles, backbone_dtype, load_tokenizer
from vla_gym.vla.smolvla_model import SmolVLANetwork, SmolVLASizes, time_embedding

# Values of config.json that the network has no code for; all published LIBERO policies have them.
_EXPECTED = {"attention_mode": "cross_attn", "add_image_special_tokens": False}


class SmolVLABackend(FlowBackend):
    """:class:`~vla_gym.vla.base.FrozenVLA` over :class:`SmolVLANetwork`."""

    centred_padding = False
    model: SmolVLANetwork

    def __init__(
        self,
        model: SmolVLANetwork,
        files: LeRobotPolicyFiles,
        tokenizer: Any,
        options: FlowOptions,
        *,
        compile: bool = False,
    ) -> None:
        """Freeze a network; arguments as for FlowBackend, ``compile`` as for from_pretrained."""
        width, height = files.config.get("resize_imgs_with_padding") or [files.image_size] * 2
        super().__init__(
            model,
            files,
            tokenizer,
            options,
            hidden_size=model.hidden_size,
            pixel_size=(int(height), int(width)),
            num_steps=model.sizes.num_steps,
            pad_prompts=compile,
        )
        self._prefill, self._denoise = model.prefill, model.denoise
        if compile:
            self._prefill = torch.compile(model.prefill, dynamic=False)
            self._denoise = torch.compile(model.denoise, dynamic=False)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        vlm: str | Path | None = None,
        noise: str = "fixed",
        seed: int = 0,
        num_steps: int | None = None,
        image_size: int | None = None,
    ) -> SmolVLABackend:
        """Load a policy that lerobot saved.

        Args:
            folder: With config.json, model.safetensors, processors and their statistics.
            device: Torch device.
            dtype: Of VLM and expert; None for bfloat16 on a GPU and float32 elsewhere. The
                projections of state, actions and time are float32 always.
            compile: Whether to compile the network; prompts are then padded to one length, so
                that it is compiled once for each batch size.
            vlm: Folder with config.json and tokenizer of the SmolVLM that the policy was made
                from; None looks into the checkpoint, its subfolder ``vlm`` and huggingface_hub's
                cache.
            noise: See :mod:`vla_gym.vla.flow`.
            seed: Of the noise.
            num_steps: Denoising steps; None for the checkpoint's.
            image_size: Side in pixels of the renders; None for that of the training data.

        Raises:
            ConfigError: If an option is out of range or ``vlm`` lacks a file.
            WeightsError: If a file is missing or corrupt, or does not fit.
            NotEnoughMemoryError: If the weights do not fit into the device.
        """
        from transformers import SmolVLMConfig

        options = FlowOptions(noise, seed, num_steps, image_size)
        files = LeRobotPolicyFiles(
            Path(folder), "smolvla", state_dim=PROPRIO_SIZE, action_dim=ACTION_SIZE
        )
        sizes = _read_sizes(files)
        backbone = files.backbone_folder(vlm, "config.json", "tokenizer.json")
        tokenizer = load_tokenizer(backbone)
        try:
            vlm_config = SmolVLMConfig.from_pretrained(str(backbone), local_files_only=True)
        except Exception as error:  # whatever transformers raises for a broken file
            raise WeightsError(f"Cannot read {backbone / 'config.json'}: {error}") from error
        with torch.device("meta"):
            model = SmolVLANetwork(sizes, vlm_config)
        load_into(
            model,
            Checkpoint(files.folder),
            device=device,
            dtype=backbone_dtype(dtype, device),
            rename=_rename,
            keep_float32=("state_proj", "action_"),
        )
        return cls(model, files, tokenizer, options, compile=compile)

    def sample(
        self,
        pixels: torch.Tensor,
        image_mask: torch.Tensor,
        tokens: torch.Tensor,
        token_mask: torch.Tensor,
        state: torch.Tensor,
        noise: torch.Tensor,
    ) -> FlowOutput:
        """Run the VLM once and the expert at every step; see :meth:`FlowBackend.sample`."""
        prefix = self._prefill(pixels, image_mask, tokens, token_mask, state)
        sizes, hidden = self.model.sizes, None
        for step in range(self.num_steps):
            time = time_embedding(
                1.0 - step / self.num_steps,
                self.hidden_size,
                sizes.min_period,
                sizes.max_period,
                noise.device,
            )
            hidden, velocity = self._denoise(prefix, noise, time)
            noise = noise - velocity / self.num_steps
        assert hidden is not None
        return FlowOutput(hidden, noise)


def _read_sizes(files: LeRobotPolicyFiles) -> SmolVLASizes:
    config = files.config
    for key, expected in _EXPECTED.items():
        if config.get(key, expected) != expected:
            raise WeightsError(
                f"Checkpoint {files.folder} has {key} {config[key]!r}: only {expected!r} is "
                "implemented."
            )
    sizes = SmolVLASizes(
        **{field.name: config[field.name] for field in fields(SmolVLASizes) if field.name in config}
    )
    if config.get("num_expert_layers", -1) not in (-1, 0, sizes.num_vlm_layers):
        raise WeightsError(
            f"Checkpoint {files.folder} has num_expert_layers {config['num_expert_layers']}: only "
            "as many as num_vlm_layers are implemented."
        )
    return sizes


def _rename(name: str) -> str | None:
    """Return the network's name of a checkpoint's tensor; None for what is never used."""
    name = name.replace("_orig_mod.", "")  # saved from a compiled policy
    # Statistics in checkpoints from before the processors, and the VLM's unused head.
    if not name.startswith("model.") or ".lm_head." in name:
        return None
    return name.removeprefix("model.")
