"""Image and proprioception preprocessing shared by cloning, inference and demonstrations.

Only NumPy is imported, so that recording demonstrations needs no torch. There is one function
for each step on purpose: a policy that sees other pixels in inference than in training fails
quietly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vla_gym.errors import ConfigError

#: Height and width in pixels that the embedded VLA works on.
IMAGE_SIZE = 64


def check_images(
    images: Mapping[str, np.ndarray], cameras: Sequence[str], size: int
) -> list[np.ndarray]:
    """Return the images of some cameras, each (B, size, size, 3) uint8 with the same B.

    Raises:
        ConfigError: If a camera is missing, or a shape, dtype or number of images is another.
    """
    if any(name not in images for name in cameras):
        raise ConfigError(f"Expected images of the cameras {cameras}, got {sorted(images)}.")
    views = [np.asarray(images[name]) for name in cameras]
    for name, view in zip(cameras, views, strict=True):
        if view.dtype != np.uint8 or view.ndim != 4 or view.shape[1:] != (size, size, 3):
            raise ConfigError(
                f"Expected {name!r} as (B, {size}, {size}, 3) uint8, got {view.dtype} "
                f"{view.shape}: make the environment with image_size={size}."
            )
    if len({len(view) for view in views}) > 1:
        raise ConfigError(
            f"Expected as many images of each camera, got {[len(view) for view in views]}."
        )
    return views


def check_rows(images: int, instructions: Sequence[str], proprio: np.ndarray) -> None:
    """Raise ConfigError unless there is one instruction and one proprio row for each image."""
    if not images == len(instructions) == len(proprio) or not images:
        raise ConfigError(
            "Expected one instruction and one proprio row per image, got "
            f"{images} images, {len(instructions)} instructions, {len(proprio)} rows."
        )


def area_downsample(images: np.ndarray, size: int = IMAGE_SIZE) -> np.ndarray:
    """Shrink images by averaging whole blocks of pixels, rounding half up.

    Averaging keeps sub-pixel information that picking every k-th pixel would throw away.

    Args:
        images: (..., H, W, C) uint8; H and W are the same multiple of ``size``.
        size: Height and width of the result in pixels.

    Returns:
        (..., size, size, C) uint8; the input itself if it has that size already.

    Raises:
        ConfigError: If the dtype is not uint8 or the size is no multiple of ``size``.
    """
    images = np.asarray(images)
    if images.dtype != np.uint8 or images.ndim < 3:
        raise ConfigError(
            f"Expected uint8 images of shape (..., H, W, C), got {images.dtype} {images.shape}."
        )
    height, width, channels = images.shape[-3:]
    factor = height // size
    if height != width or factor * size != height or not 1 <= factor <= 16:
        raise ConfigError(
            f"Expected square images whose side is a multiple of {size} (at most {16 * size}), "
            f"got {height}x{width}: render at 128 or 256 pixels."
        )
    if factor == 1:
        return images
    # Strided views added one by one in uint16 (which holds 16 x 16 x 255): 15 times as fast as a
    # sum over two axes of a reshaped array.
    rows = images.reshape(*images.shape[:-3], size, factor, width * channels)
    total = rows[..., 0, :].astype(np.uint16)
    for i in range(1, factor):
        total += rows[..., i, :]
    blocks = total.reshape(*images.shape[:-3], size, size, factor, channels)
    mean = blocks[..., 0, :] + np.uint16(factor * factor // 2)
    for i in range(1, factor):
        mean += blocks[..., i, :]
    mean //= np.uint16(factor * factor)
    return mean.astype(np.uint8)


def proprio_features(proprio: np.ndarray) -> np.ndarray:
    """Turn the observation's proprioception into features without jumps.

    The end effector points down, so its rotation angle is near pi, where the axis-angle vector
    flips its sign between neighbouring poses. Two columns of the rotation matrix do not.

    Args:
        proprio: (B, 8): end-effector position (m), axis-angle (rad), two finger joints (m).

    Returns:
        (B, 11) float32: position, first two columns of the rotation matrix, finger joints.

    Raises:
        ConfigError: If the shape is not (B, 8).
    """
    proprio = np.asarray(proprio, dtype=np.float64)
    if proprio.ndim != 2 or proprio.shape[1] != 8:
        raise ConfigError(f"Expected proprio of shape (B, 8), got {proprio.shape}.")
    vector = proprio[:, 3:6]
    angle = np.linalg.norm(vector, axis=1, keepdims=True)
    x, y, z = (vector / np.maximum(angle, 1e-9)).T
    sin, cos = np.sin(angle[:, 0]), np.cos(angle[:, 0])
    rest = 1.0 - cos  # Rodrigues' formula, first and second column
    first = np.stack([cos + x * x * rest, x * y * rest + z * sin, x * z * rest - y * sin], axis=1)
    second = np.stack([x * y * rest - z * sin, cos + y * y * rest, y * z * rest + x * sin], axis=1)
    return np.concatenate([proprio[:, :3], first, second, proprio[:, 6:]], axis=1).astype(
        np.float32
    )
