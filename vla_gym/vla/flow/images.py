"""Resizing of images as openpi and lerobot do it."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def resize_with_padding(
    images: torch.Tensor, height: int, width: int, *, centred: bool
) -> torch.Tensor:
    """Resize images without changing their proportions and fill up with black.

    Args:
        images: (N, 3, H, W) float32 in [0, 1].
        height: Of the result.
        width: Of the result.
        centred: Whether the image is in the middle (pi0) or at the right and bottom (SmolVLA).

    Returns:
        (N, 3, height, width), bilinear without anti-aliasing.
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
