"""Pictures of episodes: both cameras over a caption, tiles in a grid, mp4 and gif files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vla_gym.errors import ConfigError

FPS = 20  # control steps per second: videos play in real time
SUFFIXES = (".mp4", ".gif")
# Frames a second of a GIF: browsers slow down what is faster than 20, and files double.
GIF_FPS = 10
Colour = tuple[int, int, int]
GREEN, RED, WHITE, GREY = (90, 220, 120), (240, 110, 100), (235, 235, 235), (150, 150, 158)
BACKGROUND, TRACK = (24, 24, 28), (52, 52, 60)
_MARGIN, _BAR, _BORDER, _GAP = 8, 4, 3, 6


@dataclass(frozen=True)
class Status:
    """What a tile's caption says beside the instruction.

    Attributes:
        label: Who acts, and from where.
        step: Control steps so far.
        limit: The step limit.
        success: The goal has been reached.
        over: The episode has ended.
    """

    label: str
    step: int
    limit: int
    success: bool = False
    over: bool = False

    @property
    def outcome(self) -> str:
        """What stands at the right end; empty while the episode runs."""
        if self.success:
            return f"success at step {self.step}"
        return "time limit" if self.over else ""

    @property
    def colour(self) -> Colour:
        """Colour of the outcome, the border and the progress bar."""
        return GREEN if self.success else RED if self.over else WHITE


class TilePainter:
    """Draws tiles of one size: camera images side by side over an instruction and a status."""

    def __init__(self, image_size: int, num_cameras: int, instructions: Iterable[str]) -> None:
        """Choose the font, and leave room for the longest of the instructions.

        Args:
            image_size: Height and width of a camera's image in pixels.
            num_cameras: Images side by side.
            instructions: All that will be shown.
        """
        self.width = image_size * num_cameras
        self._image_size = image_size
        self._font_size = max(10, min(16, self.width // 28))
        self._line = round(1.35 * self._font_size)
        rows = max((len(self._wrap(text)) for text in instructions), default=1)
        self._rows = rows
        caption = 2 * (_MARGIN // 2) + (rows + 1) * self._line + _BAR
        self.height = image_size + caption + caption % 2  # H.264 wants even sides

    def draw(self, images: Sequence[np.ndarray], instruction: str, status: Status) -> np.ndarray:
        """Return a tile, (height, width, 3) uint8.

        Args:
            images: (S, S, 3) uint8, one a camera.
            instruction: What the policy is told.
            status: The rest of the caption.
        """
        from PIL import Image, ImageDraw

        size, font = self._image_size, _font(self._font_size)
        tile = Image.new("RGB", (self.width, self.height), BACKGROUND)
        tile.paste(Image.fromarray(np.concatenate(images, axis=1)), (0, 0))
        draw = ImageDraw.Draw(tile)
        y = size + _MARGIN // 2
        for row, text in enumerate(self._wrap(instruction)):
            draw.text((_MARGIN, y + row * self._line), text, fill=WHITE, font=font)
        y += self._rows * self._line
        steps = f"step {status.step}/{status.limit}"
        left, right = f"{status.label}   {steps}", status.outcome
        room = self.width - 2 * _MARGIN
        if right and font.getlength(f"{left}   {right}") > room:
            left = steps  # the outcome matters more than who acts
        draw.text((_MARGIN, y), left, fill=GREY, font=font)
        if right:
            at = (self.width - _MARGIN, y)
            draw.text(at, right, fill=status.colour, font=font, anchor="ra")
        bottom = self.height - _BAR
        draw.rectangle((0, bottom, self.width, self.height), fill=TRACK)
        done = round(self.width * min(1.0, status.step / status.limit))
        draw.rectangle((0, bottom, done, self.height), fill=status.colour)
        if status.over:
            frame = (0, 0, self.width - 1, size - 1)
            draw.rectangle(frame, outline=status.colour, width=_BORDER)
        return np.asarray(tile)

    def _wrap(self, text: str) -> list[str]:
        """Break a text into lines that fit; a word that is too long is left as it is."""
        font, room = _font(self._font_size), self.width - 2 * _MARGIN
        lines: list[str] = []
        for word in text.split():
            if lines and font.getlength(f"{lines[-1]} {word}") <= room:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        return lines or [""]


@cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=size)


class TileFrames:
    """The frames of one tile, compressed in memory: 300 of them take about 10 MB, not 140."""

    def __init__(self) -> None:
        """Begin without frames."""
        self._frames: list[bytes] = []

    def append(self, tile: np.ndarray) -> None:
        """Keep a frame, (H, W, 3) uint8."""
        from io import BytesIO

        from PIL import Image

        buffer = BytesIO()
        Image.fromarray(tile).save(buffer, "JPEG", quality=95, subsampling=0)
        self._frames.append(buffer.getvalue())

    def __len__(self) -> int:
        """Return the number of frames."""
        return len(self._frames)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return a frame; after the end the last one, which says how it ended."""
        from io import BytesIO

        from PIL import Image

        data = self._frames[min(index, len(self._frames) - 1)]
        return np.asarray(Image.open(BytesIO(data)))


def num_columns(tiles: int, width: int, height: int) -> int:
    """Return the columns with which a grid of tiles comes closest to 16:9, without empty rows."""

    def distance(columns: int) -> float:
        rows = math.ceil(tiles / columns)
        return abs(math.log(columns * width / (rows * height) / (16 / 9)))

    return min(range(1, tiles + 1), key=distance)


def compose_grid(tiles: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Put tiles of one shape into rows with a gap between them; empty places are dark.

    Args:
        tiles: (H, W, 3) uint8 each.
        columns: Tiles a row.

    Returns:
        (rows * H + gaps, columns * W + gaps, 3) uint8.
    """
    height, width = tiles[0].shape[:2]
    rows = math.ceil(len(tiles) / columns)
    shape = (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3)
    grid = np.full(shape, np.array(BACKGROUND, np.uint8) // 2, np.uint8)
    for index, tile in enumerate(tiles):
        y, x = (index // columns) * (height + _GAP), (index % columns) * (width + _GAP)
        grid[y : y + height, x : x + width] = tile
    return grid


def tiled_frames(tiles: Sequence[TileFrames], hold_seconds: float = 1.5) -> Iterator[np.ndarray]:
    """Yield the frames of all tiles in one picture; a tile that has ended keeps its last one.

    Args:
        tiles: At least one, each with at least one frame.
        hold_seconds: How long the last picture stays, so that the outcomes can be read.
    """
    height, width = tiles[0][0].shape[:2]
    columns = num_columns(len(tiles), width, height)
    for index in range(max(len(tile) for tile in tiles) + round(hold_seconds * FPS)):
        yield compose_grid([tile[index] for tile in tiles], columns)


class _Append(Protocol):
    def __call__(self, frame: np.ndarray, /) -> None:
        """Add a frame, (H, W, 3) uint8 with even sides, the same for all."""
        ...


def check_video_path(path: Path) -> None:
    """Check that a video can be written to ``path``.

    Raises:
        ConfigError: If the name ends in neither .mp4 nor .gif, or no file can be made there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"A video's name must end in .mp4 or .gif, got {str(path)!r}.")
    trial = _scratch(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}): choose another name.") from error


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")


def write_video(path: str | Path, frames: Iterable[np.ndarray]) -> Path:
    """Write frames at 20 a second as an mp4 (H.264) or gif, by the file's name.

    Args:
        path: File to write; its folder is made, and it appears when it is whole.
        frames: (H, W, 3) uint8 each, with even sides; read one at a time.

    Raises:
        ConfigError: See :func:`check_video_path`.
    """
    path = Path(path)
    check_video_path(path)
    scratch = _scratch(path)
    writer = _gif_writer if path.suffix.lower() == ".gif" else _mp4_writer
    try:
        with writer(scratch) as append:
            for frame in frames:
                append(frame)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


@contextmanager
def _mp4_writer(path: Path) -> Iterator[_Append]:
    import imageio

    # Any even size is fine for players; imageio's default would rescale to multiples of 16.
    writer: Any = imageio.get_writer(path, fps=FPS, codec="libx264", quality=7, macro_block_size=2)
    try:
        yield writer.append_data
    finally:  # its own "with" leaves ffmpeg running after an exception
        writer.close()


@contextmanager
def _gif_writer(path: Path) -> Iterator[_Append]:
    """Keep every second frame; in the end all get one palette, so that still parts stay still."""
    from PIL import Image

    kept = TileFrames()
    count = 0

    def append(frame: np.ndarray) -> None:
        nonlocal count
        if count % (FPS // GIF_FPS) == 0:
            kept.append(frame)
        count += 1

    yield append
    palette = _palette([kept[i] for i in np.linspace(0, len(kept) - 1, 6).astype(int)])
    # Without dithering, which flickers and does not compress.
    pictures = (
        Image.fromarray(kept[i]).quantize(palette=palette, dither=Image.Dither.NONE)
        for i in range(len(kept))
    )
    pace = 1000 // GIF_FPS  # milliseconds a frame
    next(pictures).save(
        path, save_all=True, append_images=pictures, duration=pace, loop=0, optimize=False
    )


def _palette(frames: Sequence[np.ndarray]) -> Any:
    """Return a palette of some frames in which small bright things have their place too."""
    from PIL import Image

    colours = np.concatenate([frame[::2, ::2].reshape(-1, 3) for frame in frames])
    shades, counts = np.unique(colours, axis=0, return_counts=True)
    # How often a colour occurs overstates how much it would be missed: take the square root.
    pixels = np.repeat(shades, np.ceil(np.sqrt(counts)).astype(int), axis=0)
    picture = Image.fromarray(pixels[None])
    return picture.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=4)
