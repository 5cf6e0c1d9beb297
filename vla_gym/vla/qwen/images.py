"""Images for Qwen2.5-VL and Qwen3-VL: from LIBERO's renders to rows of patches.

The order is that of the policies' own rollouts (AlphaBrain and starVLA): both cameras' images are
mirrored, resized by the policy's rule, then by Qwen's, normalised and cut into patches. Every step
works on 8-bit images where the reference does, since rounding is part of the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta, Struct, field
from PIL import Image
from torch.nn import functional as F

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla.base import CAMERAS
from vla_gym.vla.files import read_json
from vla_gym.vla.preprocess import check_images

#: Height and width in pixels of the renders that the policies were trained on.
RENDER_SIZE = 256
#: How a policy resizes a render, before Qwen's own rule; see :class:`QwenImages`.
Resize = Literal["bicubic", "area", "none"]


def area_resize(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Shrink (N, H, W, 3) uint8 by averaging over the area of each new pixel, as INTER_AREA.

    ``size`` is the new height and width. Halves are rounded to even, which OpenCV does as well,
    except where it halves an image.
    """
    if images.shape[1:3] == size:
        return images
    rows = _area_weights(images.shape[1], size[0])
    columns = _area_weights(images.shape[2], size[1])
    mean = np.einsum("ih,nhwc->niwc", rows, images.astype(np.float32), optimize=True)
    mean = np.einsum("jw,niwc->nijc", columns, mean, optimize=True)
    return np.rint(mean).clip(0, 255).astype(np.uint8)


def _area_weights(old: int, new: int) -> np.ndarray:
    """Return (new, old) float32: which part of new pixel i old pixel j covers."""
    edges = np.arange(new + 1) * (old / new)
    low = np.maximum(edges[:-1, None], np.arange(old)[None])
    high = np.minimum(edges[1:, None], np.arange(1, old + 1)[None])
    return (np.maximum(high - low, 0.0) * (new / old)).astype(np.float32)


def bicubic_resize(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (N, H, W, 3) uint8 to a height and width by Pillow's bicubic filter."""
    if images.shape[1:3] == size:
        return images
    how = Image.Resampling.BICUBIC
    return np.stack(
        [np.asarray(Image.fromarray(image).resize(size[::-1], how)) for image in images]
    )


Pixels = Annotated[int, Meta(ge=1, le=2**28)]
Colour = tuple[float, float, float]
Patch = Annotated[int, Meta(ge=1, le=256)]


class _Edges(Struct):
    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class QwenImageSettings(Struct):
    """What a Qwen checkpoint's preprocessor_config.json says.

    Attributes:
        patch_size: Side of a patch in pixels.
        merge_size: Side of a token in patches.
        temporal_patch_size: Frames of a patch; a still image is repeated.
        image_mean: Of the channels, in 0..1.
        image_std: Of the channels.
        size: Has the bounds of an image's area as its "edges" in newer files.
        min_pixels: Smallest area of a resized image; older files name it.
        max_pixels: Largest area.
    """

    patch_size: Patch
    merge_size: Patch
    temporal_patch_size: Patch
    image_mean: Colour
    image_std: Colour
    size: _Edges = field(default_factory=_Edges)
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None

    @classmethod
    def from_pretrained(cls, folder: Path) -> QwenImageSettings:
        """Read preprocessor_config.json.

        Raises:
            WeightsError: If it is missing or lacks a value.
        """
        file = folder / "preprocessor_config.json"
        found = read_json(file, cls)
        found.min_pixels = found.min_pixels or found.size.shortest_edge
        found.max_pixels = found.max_pixels or found.size.longest_edge
        if found.min_pixels is None or found.max_pixels is None:
            raise WeightsError(f"{file} lacks min_pixels and max_pixels, or size with its edges.")
        return found


class QwenImages:
    """Renders to patches, for one policy.

    Attributes:
        cameras: Names of the views, in the order of the prompt.
        grid: Rows and columns of patches of one view.
        tokens_per_image: Tokens that the language model gets for one view.
    """

    def __init__(
        self,
        settings: QwenImageSettings,
        resize: Resize = "bicubic",
        size: tuple[int, int] = (224, 224),
        num_views: int = 2,
    ) -> None:
        """Fix the sizes.

        Args:
            settings: Qwen's part.
            resize: The policy's part: ``"bicubic"`` (Pillow, on the policy's side), ``"area"``
                (OpenCV's INTER_AREA, in the evaluation client) or ``"none"``.
            size: Height and width after it; unused for ``"none"``.
            num_views: 1 for agentview alone, 2 for the wrist camera too.

        Raises:
            ConfigError: If ``"area"`` would enlarge.
            WeightsError: If Qwen takes no images of the size.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if resize == "area" and max(size) > RENDER_SIZE:
            raise ConfigError(f"image_resize='area' only shrinks {RENDER_SIZE} pixels, not {size}.")
        self.cameras = CAMERAS[:num_views]
        self._settings, self._resize, self._size = settings, resize, size
        factor = settings.patch_size * settings.merge_size
        assert settings.min_pixels and settings.max_pixels  # see from_pretrained
        resized = (RENDER_SIZE, RENDER_SIZE) if resize == "none" else size
        try:
            self._final_size = smart_resize(
                *resized, factor, settings.min_pixels, settings.max_pixels
            )
        except ValueError as error:
            raise WeightsError(f"Qwen takes no images of size {resized}: {error}.") from error
        rows, columns = (side // settings.patch_size for side in self._final_size)
        self.grid = rows, columns
        self.tokens_per_image = self.grid[0] * self.grid[1] // settings.merge_size**2

    def pixels(self, images: dict[str, np.ndarray]) -> torch.Tensor:
        """Mirror and resize the views of a batch.

        Args:
            images: ``{"agentview": (B, 256, 256, 3) uint8, "wrist": the same}``, upright.

        Returns:
            (B, num_views, 3, H, W) uint8, on the CPU.

        Raises:
            ConfigError: If a view is missing or of another shape or dtype.
        """
        frames = np.stack(check_images(images, self.cameras, RENDER_SIZE), axis=1)
        batch = len(frames)
        # The policies turn LIBERO's upside-down renders by 180 degrees: upright, but mirrored.
        mirrored = np.ascontiguousarray(frames.reshape(-1, *frames.shape[2:])[:, :, ::-1])
        if self._resize == "area":
            mirrored = area_resize(mirrored, self._size)
        elif self._resize == "bicubic":
            mirrored = bicubic_resize(mirrored, self._size)
        pixels = torch.from_numpy(mirrored).permute(0, 3, 1, 2)
        if pixels.shape[-2:] != self._final_size:
            # On 8-bit images, as Qwen's processor: floats move the hidden states by 8e-3.
            pixels = F.interpolate(
                pixels.contiguous(), size=self._final_size, mode="bicubic", antialias=True
            )
        return pixels.reshape(batch, len(self.cameras), *pixels.shape[1:])

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise images and cut them into patches, on the device where they are.

        Args:
            pixels: (B, num_views, 3, H, W) uint8.

        Returns:
            (B x num_views x patches of an image, 3 x frames x patch x patch) float32; the patches
            of one token are neighbours.
        """
        s = self._settings
        scale = torch.tensor(1.0 / (1.0 / 255.0))
        mean, std = (torch.tensor(v) * scale for v in (s.image_mean, s.image_std))
        x = pixels.flatten(0, 1).float()
        x = (x - mean.to(x.device)[:, None, None]) / std.to(x.device)[:, None, None]
        count, channels = x.shape[:2]
        rows, columns = self.grid
        x = x.reshape(
            count,
            channels,
            rows // s.merge_size,
            s.merge_size,
            s.patch_size,
            columns // s.merge_size,
            s.merge_size,
            s.patch_size,
        ).permute(0, 2, 5, 3, 6, 1, 4, 7)
        x = x.unsqueeze(6).expand(*x.shape[:6], s.temporal_patch_size, *x.shape[6:])
        return x.reshape(count * rows * columns, -1)
