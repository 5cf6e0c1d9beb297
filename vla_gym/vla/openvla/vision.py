"""The vision transformers of OpenVLA (DINOv2 with registers, SigLIP), with timm's key names.

Written out rather than taken from timm or transformers: timm brings torchvision along, and
transformers' classes have other names, split q/k/v and another GELU for SigLIP. LayerNorms have
epsilon 1e-6 and GELU is exact in both towers, as in timm.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from vla_gym.outside import Count, Layers, Size
from vla_gym.vla.blocks import check_heads


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a tower.

    Attributes:
        width: Size of a token.
        depth: Number of blocks.
        num_heads: Of each block.
        mlp_width: Hidden size of a block's MLP.
        num_patches: (image side / patch side) squared.
        patch_size: Patch side in pixels.
        registers: Register tokens.
        cls_token: Whether there is a class token.
        layer_scale: Whether blocks scale their residuals (DINOv2).
    """

    width: Size
    depth: Layers
    num_heads: Size
    mlp_width: Size
    num_patches: int = 256
    patch_size: Size = 14
    registers: Count = 0
    cls_token: bool = False
    layer_scale: bool = False


#: The towers of the published 7B checkpoints.
DINOV2_LARGE = ViTConfig(1024, 24, 16, 4096, registers=4, cls_token=True, layer_scale=True)
SIGLIP_SO400M = ViTConfig(1152, 27, 16, 4304)


class _Scale(nn.Module):
    """Multiplies by a vector; OpenVLA calls timm's ``gamma`` ``scale_factor``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale_factor


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        check_heads(width, num_heads)
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp_width
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = _Attention(width, config.num_heads)
        self.ls1 = _Scale(width) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        fc1, fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))
        self.ls2 = _Scale(width) if config.layer_scale else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTower(nn.Module):
    """A tower as OpenVLA uses it: the patch tokens that leave the last block but one.

    What comes after that block in the checkpoints is left out.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        proj = nn.Conv2d(3, width, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": proj})
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_patches, width))
        if config.cls_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        if config.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, config.registers, width))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth - 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, 3, side, side), normalised, to patch tokens (B, num_patches, width)."""
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2) + self.pos_embed
        extra = [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in extra), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, -self.config.num_patches :]
