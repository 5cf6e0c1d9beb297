"""The QwenOFT network: Qwen2.5-VL or Qwen3-VL without its output layer, and an action head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from vla_gym.vla.base import ACTION_SIZE
from vla_gym.vla.blocks import ResidualMLP
from vla_gym.vla.qwen.prompt import PromptBatch

#: Model types of config.json that there are policies for.
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")


class EqualSegmentAttention(nn.Module):
    """Attention of a vision block, for segments (windows or images) of one size.

    The same numbers as transformers' own, which calls the kernel once for each segment: 256 times a
    block for 32 observations of Qwen2.5-VL. Here the segments are a batch.
    """

    def __init__(self, attention: Any) -> None:
        """Take over the layers of transformers' module."""
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.num_heads, self.scaling = attention.num_heads, attention.scaling

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """Attend within each segment of (N, width), with cosines and sines (N, head size).

        Of ``cu_seqlens`` (segments + 1,) only the length is looked at, which needs no transfer from
        the GPU.
        """
        count = len(cu_seqlens) - 1
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scaling)
        out = self.proj(out.transpose(1, 2).flatten(0, 1).flatten(1))
        return out


class QwenOFT(nn.Module):
    """Patches and prompts to action queries' hidden states and normalised actions.

    Attributes:
        vlm: transformers' Qwen2_5_VLModel or Qwen3VLModel.
        action_model: ``.model`` is the head; named as in the checkpoints.
        has_final_norm: Whether the language model's last norm is there.
    """

    def __init__(self, config: Any, grid: tuple[int, int], final_norm: bool | None = None) -> None:
        """Build the network, on torch's current default device.

        Args:
            config: Of the VLM, as transformers reads it.
            grid: Rows and columns of patches of every image.
            final_norm: Whether the head reads the hidden states after the language model's last
                norm. None for what the checkpoints of this model type were trained with:
                transformers 4.57 gave the normalised states for Qwen2.5-VL and, by a quirk, those
                before the norm for Qwen3-VL; transformers 5 gives normalised ones for both.
        """
        super().__init__()
        self.vlm: Any = AutoModel.from_config(config)
        if final_norm is None:
            final_norm = config.model_type != "qwen3_vl"
        self.has_final_norm = final_norm
        if not final_norm:
            self.vlm.language_model.norm = nn.Identity()
        self._batch_segments(config.vision_config, grid)
        width = config.text_config.hidden_size
        self.action_model = nn.ModuleDict({"model": ResidualMLP(width, 2 * width, ACTION_SIZE)})
        self._grid = grid

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        device: torch.device = next(self.parameters()).device
        return device

    def _batch_segments(self, vision: Any, grid: tuple[int, int]) -> None:
        merge = vision.spatial_merge_size
        window = getattr(vision, "window_size", None)
        whole = set(getattr(vision, "fullatt_block_indexes", range(len(self.vlm.visual.blocks))))
        if window is None:
            even = True
        else:
            side = window // merge // vision.patch_size
            even = all((n // merge) % side == 0 for n in grid)
        for i, block in enumerate(self.vlm.visual.blocks):
            if even or i in whole:  # else the windows at the border are smaller
                block.attn = EqualSegmentAttention(block.attn)

    def forward(
        self, patches: torch.Tensor, prompts: PromptBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one batch.

        Args:
            patches: (patches of all images, size of a patch) of any float dtype.
            prompts: B prompts on the same device.

        Returns:
            Hidden states (B, C, H) float32 and normalised actions (B, C, 7) float32.
        """
        per_image = self._grid[0] * self._grid[1]
        grid = torch.tensor([[1, *self._grid]], device=patches.device)
        states = self.vlm(
            input_ids=prompts.ids,
            attention_mask=prompts.mask,
            position_ids=prompts.positions,
            pixel_values=patches,
            image_grid_thw=grid.repeat(len(patches) // per_image, 1),
            use_cache=False,
        ).last_hidden_state
        index = prompts.queries[:, :, None].expand(-1, -1, states.shape[-1])
        hidden = states.gather(1, index).float()
        actions: torch.Tensor = self.action_model["model"](hidden)
        return hidden, actions

    def rope_positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the multimodal positions (3, L) of ids (L,) with images in them."""
        is_image = (ids == self.vlm.config.image_token_id).int()
        merge = self.vlm.config.vision_config.spatial_merge_size
        per_image = self._grid[0] * self._grid[1] // merge**2
        grids = torch.tensor([[1, *self._grid]]).repeat(int(is_image.sum()) // per_image, 1)
        found = self.vlm.get_rope_index(
            ids[None], mm_token_type_ids=is_image[None], image_grid_thw=grids
        )
        positions: torch.Tensor = found[0][:, 0]
        return positions
