"""Film strips of a run or card: what ``vla-gym eval --films`` and ``--videos`` left."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.play.video import compose_grid
from vla_gym_trainers.evaluation.cards import EvalCard, films_folder, read_card
from vla_gym_trainers.report.data import Run

# Frames of a strip that is cut out of a video, and the height of one in pixels.
_FRAMES, _HEIGHT = 6, 160
_WIDEST = 1400


@dataclass(frozen=True)
class Strip:
    """Pictures of one task.

    Attributes:
        title: Which task or episode.
        pictures: Name and ``data:`` address of each: before and after, or one alone.
    """

    title: str
    pictures: tuple[tuple[str, str], ...]


def strips_of_run(run: Run, limit: int) -> list[Strip]:
    """Return the strips of a run: cut out of its ``videos/``, or of its evaluations' films."""
    if limit == 0 or not run.path.is_dir():
        return []
    pairs = [
        (f"{run.name}: {video.name.removesuffix('_vla.mp4')}", video, _after(video))
        for video in sorted((run.path / "videos").glob("*_vla.mp4"))
        if _after(video).is_file()
    ]
    strips = [
        Strip(title, (("VLA", _of_video(before)), ("policy", _of_video(after))))
        for title, before, after in pairs[:limit]
    ]
    start, policy = run.path / "eval_start", run.path / "eval_policy"
    if (policy / "card.json").is_file():
        before = start if (start / "card.json").is_file() else None
        strips += _of_folders(run.name, before, policy)
    return strips[:limit]


def strips_of_card(name: str, card: EvalCard, limit: int) -> list[Strip]:
    """Return the strips of an evaluation beside those of the one it is paired with."""
    other = card.content["results"].get("paired", {}).get("with")
    before = None
    if other is not None:
        try:
            before = read_card(Path(other)).path
        except ConfigError:
            pass  # moved since: its counts are in this card, its films are not
    return _of_folders(name, before, card.path)[:limit]


def _of_folders(name: str, before: Path | None, after: Path) -> list[Strip]:
    """Return the strips that ``vla-gym eval --films`` wrote at one or two places."""
    strips = []
    for file in sorted(_folder(after).glob("*.png")):
        pictures = []
        if before is not None and (old := _folder(before) / file.name).is_file():
            pictures.append(("before", _of_picture(old)))
        pictures.append(("after" if pictures else "films", _of_picture(file)))
        strips.append(Strip(f"{name}: {file.stem.replace('_', ' ')}", tuple(pictures)))
    return strips


def _folder(place: Path) -> Path:
    if place.name == "card.json":  # --out was its directory
        return films_folder(place.parent)
    return films_folder(place)


def _after(video: Path) -> Path:
    return video.with_name(video.name.replace("_vla.mp4", "_policy.mp4"))


def _of_video(path: Path) -> str:
    import imageio.v3 as iio

    try:
        frames = list(iio.imiter(path))
        chosen = np.linspace(0, len(frames) - 1, _FRAMES).round().astype(int)
        tiles = [_shrunk(frames[i]) for i in chosen.tolist()]
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read as a video: {error}") from error
    return _address(compose_grid(tiles, _FRAMES))


def _of_picture(path: Path) -> str:
    import imageio.v3 as iio

    try:
        return _address(np.asarray(iio.imread(path))[..., :3])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a picture: {error}") from error


def _shrunk(frame: np.ndarray) -> np.ndarray:
    from PIL import Image

    height, width = frame.shape[:2]
    size = (max(1, round(width * _HEIGHT / height)), _HEIGHT)
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX))


def _address(picture: np.ndarray) -> str:
    """Return a picture as a ``data:`` address, JPEG, so that many fit into a page."""
    from PIL import Image

    image = Image.fromarray(picture)
    if image.width > _WIDEST:
        height = max(1, round(image.height * _WIDEST / image.width))
        image = image.resize((_WIDEST, height), Image.Resampling.BOX)
    file = BytesIO()
    image.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def strips_of(
    runs: Sequence[Run], cards: Sequence[tuple[str, EvalCard]], limit: int
) -> tuple[list[Strip], list[str]]:
    """Return the strips of everything, and sentences about what has none."""
    strips: list[Strip] = []
    missing = []
    sources: list[tuple[str, Any]] = [(r.name, strips_of_run(r, limit)) for r in runs]
    sources += [(name, strips_of_card(name, card, limit)) for name, card in cards]
    for name, found in sources:
        strips += found
        if not found and limit:
            missing.append(name)
    if not missing:
        return strips, []
    advice = "train with --videos, or evaluate with --films"
    return strips, [f"No films: {', '.join(missing)} ({advice})."]
