"""What the flow-matching policies compute alike: rotation, attention, time, size of images."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

#: Base of the rotary embedding, also where SmolVLA's VLM names another ``rope_theta`` (100000).
ROPE_BASE = 10_000.0


def apply_rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate (B, heads, N, head_dim) by positions (B, N), in float32."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float32, device=x.device) * (2.0 / x.shape[-1])
    angles = positions[:, None, :, None].float() / ROPE_BASE**exponents
    sin, cos = angles.sin(), angles.cos()
    first, second = x.float().split(half, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def time_embedding(
    time: float, size: int, min_period: float, max_period: float, device: torch.device
) -> torch.Tensor:
    """Return sines and cosines (size,) float32 of a time in [0, 1], computed in float64."""
    fraction = torch.linspace(0.0, 1.0, size // 2, dtype=torch.float64)
    period = min_period * (max_period / min_period) ** fraction
    # Rounded to float32 first, as the time reaches the network in training.
    angle = torch.tensor(time, dtype=torch.float32).double() * (2.0 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()]).float().to(device)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return (B, N, heads * head_dim) of grouped-query attention under a bool mask."""
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)


def resize_with_padding(
    images: torch.Tensor, height: int, width: int, *, centred: bool
) -> torch.Tensor:
    """Resize (N, 3, H, W) float32 in [0, 1] to (N, 3, height, width) as openpi and lerobot do.

    Bilinear without anti-aliasing; proportions stay, the rest is black. ``centred`` says whether
    the image is in the middle (pi0) or at the right and bottom (SmolVLA).
    """
    old_height, old_width = images.shape[-2:]
    if (old_height, old_width) == (height, width):
        return images
    ratio = max(old_width / width, old_height / height)
    size = (int(old_height / ratio), int(old_width / ratio))
    images = F.interpolate(images, size, mode="bilinear", align_corners=False)
    above, left = height - size[0], width - size[1]
    if centred:
        above, left = above // 2, left // 2
    padding = (left, width - size[1] - left, above, height - size[0] - above)
    return F.pad(images, padding) if any(padding) else images
