"""What a VLA has seen, packed into one row of bytes, so that it can be shown it again later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.vla.preprocess import area_downsample

if TYPE_CHECKING:
    from vla_gym.vla.base import FrozenVLA

#: Bytes of an instruction in UTF-8, zeros at its end; LIBERO's longest has 89.
TEXT_BYTES = 256


class VLAInputs:
    """Packs camera images and instruction of an observation; proprioception is stored apart.

    Images are kept at the backend's ``input_size`` where it has one: to the VLA they are the same,
    bit for bit (see :class:`vla_gym.vla.FrozenVLA`). Two cameras at 64 x 64 and the
    instruction are 24,832 bytes.

    Attributes:
        size: Bytes of a row.
    """

    def __init__(self, vla: FrozenVLA, image_shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take the sizes from a VLA, or from (H, W, 3) of each camera's renders."""
        self._side = side = vla.input_size
        self._shapes = {
            view: tuple(image_shapes[view]) if side is None else (side, side, 3)
            for view in vla.cameras
        }
        self._ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes.values()])
        self.size = int(self._ends[-1]) + TEXT_BYTES

    def pack(self, views: Mapping[str, np.ndarray], instructions: Sequence[str]) -> np.ndarray:
        """Return rows (B, size) uint8 of images, each (B, H, W, 3) uint8, and B instructions.

        Raises:
            ConfigError: If an instruction is longer than ``TEXT_BYTES``, or an image cannot be
                shrunk to the VLA's size.
        """
        rows = np.zeros((len(instructions), self.size), np.uint8)
        for view, part in zip(self._shapes, np.split(rows, self._ends, axis=1), strict=False):
            images = views[view]
            small = images if self._side is None else area_downsample(images, self._side)
            part[:] = small.reshape(len(rows), -1)
        for row, instruction in zip(rows, instructions, strict=True):
            text = instruction.encode()
            if len(text) > TEXT_BYTES:
                raise ConfigError(
                    f"Expected an instruction of at most {TEXT_BYTES} bytes, got {len(text)}: "
                    f"{instruction!r}. Shorten it, or do not keep the VLA's inputs."
                )
            row[self.size - TEXT_BYTES :][: len(text)] = np.frombuffer(text, np.uint8)
        return rows

    def unpack(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return the images, each (B, H, W, 3) uint8, and the instructions of rows (B, size)."""
        *parts, texts = np.split(rows, self._ends, axis=1)
        views = {
            view: np.ascontiguousarray(part).reshape(len(rows), *shape)
            for (view, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        return views, [text.tobytes().rstrip(b"\0").decode() for text in texts]
