"""Pictures of episodes: both cameras over a caption, tiles in a grid, mp4 and gif files."""

from __future__ import annotations

import io
import itertools
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vla_gym.errors import ConfigError
from vla_gym.files import replacing, scratch_path

FPS = 20  # control steps per second: videos play in real time
HOLD_SECONDS = 1.5  # how long a video's last picture stays
SUFFIXES = (".mp4", ".gif")
# Frames a second of a GIF: browsers slow down what is faster than 20, and files double.
GIF_FPS = 10
# After the last frame; a GIF is written only then.
_FFMPEG_SECONDS = 600.0
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


def draw_tile(
    images: Sequence[np.ndarray], instruction: str, status: Status, rows: int
) -> np.ndarray:
    """Return a tile: camera images side by side over an instruction and a status.

    Args:
        images: (S, S, 3) uint8, one a camera.
        instruction: What the policy is told.
        status: The rest of the caption.
        rows: Lines that the instruction has room for, see :func:`text_rows`, so that tiles of
            several instructions are equally high.

    Returns:
        (height, width, 3) uint8; both are even, as H.264 wants them, if S is.
    """
    size, width = len(images[0]), len(images[0]) * len(images)
    font, line = _font(width)
    height = size + _MARGIN + (rows + 1) * line + _BAR
    height += height % 2
    tile = Image.new("RGB", (width, height), BACKGROUND)
    tile.paste(Image.fromarray(np.concatenate(images, axis=1)), (0, 0))
    draw = ImageDraw.Draw(tile)
    y = size + _MARGIN // 2
    for row, text in enumerate(_wrap(instruction, width)):
        draw.text((_MARGIN, y + row * line), text, fill=WHITE, font=font)
    y += rows * line
    steps = f"step {status.step}/{status.limit}"
    left, right = f"{status.label}   {steps}", status.outcome
    if right and font.getlength(f"{left}   {right}") > width - 2 * _MARGIN:
        left = steps  # the outcome matters more than who acts
    draw.text((_MARGIN, y), left, fill=GREY, font=font)
    if right:
        draw.text((width - _MARGIN, y), right, fill=status.colour, font=font, anchor="ra")
    draw.rectangle((0, height - _BAR, width, height), fill=TRACK)
    done = round(width * min(1.0, status.step / status.limit))
    draw.rectangle((0, height - _BAR, done, height), fill=status.colour)
    if status.over:
        draw.rectangle((0, 0, width - 1, size - 1), outline=status.colour, width=_BORDER)
    return np.asarray(tile)


def text_rows(instructions: Iterable[str], width: int) -> int:
    """Return how many lines the longest of the instructions takes in a tile of that width."""
    return max((len(_wrap(text, width)) for text in instructions), default=1)


def _wrap(text: str, width: int) -> list[str]:
    """Break a text into lines that fit; a word that is too long is left as it is."""
    font, _ = _font(width)
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width - 2 * _MARGIN:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


@cache
def _font(width: int) -> tuple[Any, int]:
    """Return the font of a tile's caption, and the height of a line."""
    size = max(10, min(16, width // 28))
    return ImageFont.load_default(size=size), round(1.35 * size)


class TileFrames:
    """The frames of one tile, compressed in memory: 300 of them take about 10 MB, not 140."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []

    def append(self, tile: np.ndarray) -> None:
        """Keep a frame, (H, W, 3) uint8."""
        buffer = io.BytesIO()
        Image.fromarray(tile).save(buffer, "JPEG", quality=95, subsampling=0)
        self._frames.append(buffer.getvalue())

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return a frame; after the end the last one, which says how it ended."""
        data = self._frames[min(index, len(self._frames) - 1)]
        return np.asarray(Image.open(io.BytesIO(data)))


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


def tiled_frames(tiles: Sequence[TileFrames]) -> Iterator[np.ndarray]:
    """Yield the frames of all tiles in one picture; a tile that has ended keeps its last one.

    The last picture stays for HOLD_SECONDS, so that the outcomes can be read.

    Args:
        tiles: At least one, each with at least one frame.
    """
    height, width = tiles[0][0].shape[:2]
    columns = num_columns(len(tiles), width, height)
    for index in range(max(len(tile) for tile in tiles) + round(HOLD_SECONDS * FPS)):
        yield compose_grid([tile[index] for tile in tiles], columns)


def check_video_path(path: Path) -> None:
    """Check that a video can be written to ``path``.

    Raises:
        ConfigError: If the name ends in neither .mp4 nor .gif, or no file can be made there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"A video's name must end in .mp4 or .gif, got {str(path)!r}.")
    trial = scratch_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}): choose another name.") from error


def write_video(path: str | Path, frames: Iterable[np.ndarray]) -> Path:
    """Write frames at 20 a second as an mp4 (H.264) or gif, by the file's name.

    Args:
        path: File to write; its folder is made, and it appears when it is whole.
        frames: (H, W, 3) uint8 each, with even sides; read one at a time.

    Raises:
        ConfigError: See :func:`check_video_path`.
        OSError: If ffmpeg fails, with its last words; what was there before stays.
    """
    path = Path(path)
    check_video_path(path)
    with replacing(path) as scratch:
        _encode(path, scratch, frames)
    return path


def _encode(path: Path, scratch: Path, frames: Iterable[np.ndarray]) -> None:
    """Have ffmpeg write frames; not with imageio_ffmpeg.write_frames, which misses its failure."""
    from imageio_ffmpeg import get_ffmpeg_exe

    if path.suffix.lower() == ".gif":
        # One palette for all frames and no dithering, so that still parts stay still.
        filters = f"fps={GIF_FPS},split[a][b];[a]palettegen[p];[b][p]paletteuse=dither=none"
        codec = ["-c:v", "gif", "-pix_fmt", "pal8", "-filter_complex", filters]
        codec += ["-loop", "0", "-f", "gif"]
    else:
        codec = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "15", "-f", "mp4"]
        codec += ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]  # H.264 wants even sides
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ConfigError(f"No frames for {path}: play at least one step.")
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{first.shape[1]}x{first.shape[0]}"]
    command = [get_ffmpeg_exe(), "-v", "error", "-y", *raw, "-r", str(FPS), "-i", "-", *codec]
    # In memory: a full disk must not swallow the words about it.
    with open(os.memfd_create("ffmpeg"), "w+b") as words:
        process = subprocess.Popen(  # in a group of its own: Ctrl-C must not reach it
            [*command, str(scratch)], stdin=subprocess.PIPE, stderr=words, process_group=0
        )
        assert process.stdin is not None
        try:
            for frame in itertools.chain([first], frames):
                try:
                    process.stdin.write(np.ascontiguousarray(frame).data)
                except BrokenPipeError:  # it has ended: its status says so
                    break
            process.communicate(timeout=_FFMPEG_SECONDS)
        except BaseException as error:
            process.kill()
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise OSError(f"ffmpeg did not finish {path}: {error}") from error
            raise
        words.seek(0)
        text = words.read().decode(errors="replace").strip()
    if process.returncode:
        raise OSError(f"ffmpeg ended with {process.returncode} at {path}: {text[-2000:]}")
