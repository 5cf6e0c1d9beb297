"""From renders to the pixels that OpenVLA was trained on.

openvla-oft's evaluation does it in TensorFlow: turn by 180 degrees, JPEG there and back, shrink to
224 pixels (lanczos3, antialiased), cut out the middle 90 % of the area and blow that up again
(bilinear), normalise once for each vision tower. Here the same in PyTorch, on any device, from
uint8 images; the JPEG alone is made on the CPU.

Compared with TensorFlow 2.21 (tests/golden/openvla): JPEG, crop and normalisation are exact;
lanczos3 differs by one level on 1.6 % of the pixels, since the sums are in another order.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import simplejpeg
import torch
from PIL import Image

#: Renders that the pipeline starts from: what LIBERO's data was recorded with.
RENDER_SIZE = 256
#: Area of the middle that is left of an image: training took random crops of this size.
CROP_AREA = 0.9
# Mean and standard deviation: of ImageNet for DINOv2, then SigLIP's.
_MEAN = (0.485, 0.456, 0.406, 0.5, 0.5, 0.5)
_STD = (0.229, 0.224, 0.225, 0.5, 0.5, 0.5)


def jpeg_roundtrip(images: np.ndarray) -> np.ndarray:
    """Return what TensorFlow makes of (N, H, W, 3) uint8 by encoding and decoding it as JPEG.

    Pillow's encoder writes TensorFlow's bytes; its decoder uses the slow inverse cosine transform,
    TensorFlow's the fast one (a difference of up to 19 levels).
    """
    # Both libraries let other threads run meanwhile. Threads that outlived the call would not be in
    # a forked process, which would wait for them.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return np.stack(list(threads.map(_jpeg_one, images)))


def _jpeg_one(image: np.ndarray) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(stream, "JPEG", quality=95, subsampling=2)
    decoded: np.ndarray = simplejpeg.decode_jpeg(
        stream.getvalue(), fastdct=True, fastupsample=False
    )
    return decoded


def lanczos_resize(images: torch.Tensor, size: int) -> torch.Tensor:
    """Resize (N, H, W, 3) uint8 to (N, size, size, 3) uint8, rounded.

    Like ``tf.image.resize(method="lanczos3", antialias=True)``.
    """
    rows = _lanczos_matrix(images.shape[1], size).to(images.device)
    columns = _lanczos_matrix(images.shape[2], size).to(images.device)
    shrunk = torch.einsum("yh,nhwc,xw->nyxc", rows, images.float(), columns)
    return shrunk.round().clamp(0, 255).to(torch.uint8)


@lru_cache(8)
def _lanczos_matrix(before: int, after: int) -> torch.Tensor:
    """Return the weights (after, before) of every old pixel in every new one."""
    scale = max(before / after, 1.0)
    centres = (np.arange(after) + 0.5) * before / after
    x = np.abs((np.arange(before) + 0.5)[None] - centres[:, None]) / scale
    weights = np.where(x < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)
    return torch.from_numpy(weights / weights.sum(1, keepdims=True)).float()


def center_crop(images: torch.Tensor) -> torch.Tensor:
    """Cut the middle CROP_AREA out of (N, S, S, 3) uint8 and scale it back up.

    Like TensorFlow's ``crop_and_resize``, whose bilinear interpolation puts the corners of crop and
    result onto each other and does not smooth; other crops (to whole pixels, or smoothed) differ by
    3 levels on average.
    """
    size = images.shape[1]
    low, high, share = (x.to(images.device) for x in _crop_positions(size))
    # Multiplied, not divided: exactly as convert_image_dtype does it.
    x = images.float() * float(np.float32(1.0 / 255.0))
    across = share[:, None]
    x = x[:, :, low] + (x[:, :, high] - x[:, :, low]) * across
    down = share[:, None, None]
    x = x[:, low] + (x[:, high] - x[:, low]) * down
    return (x.clamp(0.0, 1.0) * 255.5).to(torch.uint8)


@lru_cache(8)
def _crop_positions(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the two neighbours of every new pixel and the second one's share, in float32."""
    side = np.sqrt(np.float32(CROP_AREA))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    end = start + side
    last = np.float32(size - 1)
    step = (end - start) * last / last
    positions = start * last + np.arange(size, dtype=np.float32) * step
    low = np.floor(positions)
    return (
        torch.from_numpy(low.astype(np.int64)),
        torch.from_numpy(np.ceil(positions).astype(np.int64)),
        torch.from_numpy(positions - low),
    )


def normalize_pixels(images: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return (N, 6, S, S): for DINOv2 and for SigLIP normalised versions of (N, S, S, 3) uint8."""
    x = images.permute(0, 3, 1, 2).float() / 255.0
    x = torch.cat([x, x], dim=1)
    mean, std = (torch.tensor(v, device=x.device).view(1, 6, 1, 1) for v in (_MEAN, _STD))
    return ((x - mean) / std).to(dtype)


def preprocess(
    views: Sequence[np.ndarray],
    size: int,
    device: str | torch.device,
    *,
    jpeg: bool = True,
    crop: bool = True,
) -> torch.Tensor:
    """Turn upright renders of one or several cameras into uint8 pixels on a device.

    Args:
        views: For each camera (B, 256, 256, 3) uint8, upright.
        size: Side of the network's images in pixels.
        device: Where the resizing happens; images go there as uint8.
        jpeg: Whether images are compressed as the training data was.
        crop: Whether to cut out the middle, as is done for policies trained on random crops.

    Returns:
        (B * V, size, size, 3) uint8, the views of each row next to each other.
    """
    # LIBERO's data are upside down and mirrored.
    stacked = np.stack([view[:, ::-1, ::-1] for view in views], axis=1)
    stacked = stacked.reshape(-1, RENDER_SIZE, RENDER_SIZE, 3)
    images = torch.from_numpy(jpeg_roundtrip(stacked) if jpeg else stacked)
    images = lanczos_resize(images.to(device, non_blocking=True), size)
    return center_crop(images) if crop else images
