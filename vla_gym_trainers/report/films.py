"""Film strips of a run or card: what ``vla-gym eval --films`` and ``--videos`` left."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.play.video import compose_grid
from vla_gym_trainers.evaluation.cards import EvalCard, films_folder, read_card
from vla_gym_trainers.report.data import Run

# Frames of a strip that is cut out of a video, and the height of one in pixels.
_FRAMES, _HEIGHT = 6, 160
_WIDEST = 1400
#: Which task or episode, then name and ``data:`` address of each picture: before and after, or one.
Strip = tuple[str, list[tuple[str, str]]]


def strips_of(
    runs: Sequence[Run], cards: Sequence[tuple[str, EvalCard]], limit: int
) -> tuple[list[Strip], list[str]]:
    """Return at most ``limit`` strips of each run and card, and a sentence about what has none."""
    found = [(run.name, _of_run(run, limit)) for run in runs]
    found += [(name, _of_card(name, card)[:limit]) for name, card in cards]
    strips = [strip for _, own in found for strip in own]
    missing = [name for name, own in found if not own and limit]
    if not missing:
        return strips, []
    advice = "train with --videos, or evaluate with --films"
    return strips, [f"No films: {', '.join(missing)} ({advice})."]


def _of_run(run: Run, limit: int) -> list[Strip]:
    """Return the strips of a run: cut out of its ``videos/``, or of its evaluations' films."""
    strips: list[Strip] = []
    for before in sorted((run.path / "videos").glob("*_vla.mp4")):
        name = before.name.removesuffix("_vla.mp4")
        after = before.with_name(f"{name}_policy.mp4")
        if after.is_file() and len(strips) < limit:
            pictures = [("VLA", _of_video(before)), ("policy", _of_video(after))]
            strips.append((f"{run.name}: {name}", pictures))
    start, policy = run.path / "eval_start", run.path / "eval_policy"
    return [*strips, *_of_folders(run.name, start / "card.json", policy / "card.json")][:limit]


def _of_card(name: str, card: EvalCard) -> list[Strip]:
    """Return the strips of an evaluation beside those of the one it is paired with."""
    other = card.content["results"].get("paired", {}).get("with")
    before = None
    if other is not None:
        try:
            before = read_card(Path(other)).path
        except ConfigError:
            pass  # moved since: its counts are in this card, its films are not
    return _of_folders(name, before, card.path)


def _of_folders(name: str, before: Path | None, after: Path) -> list[Strip]:
    """Return the strips that ``vla-gym eval --films`` wrote at one or two places."""
    strips: list[Strip] = []
    for file in sorted(_folder(after).glob("*.png")):
        pictures = []
        if before is not None and (old := _folder(before) / file.name).is_file():
            pictures.append(("before", _of_picture(old)))
        pictures.append(("after" if pictures else "films", _of_picture(file)))
        strips.append((f"{name}: {file.stem.replace('_', ' ')}", pictures))
    return strips


def _folder(place: Path) -> Path:
    # With card.json, --out was its directory.
    return films_folder(place.parent if place.name == "card.json" else place)


def _of_video(path: Path) -> str:
    import imageio.v3 as iio

    try:
        frames = list(iio.imiter(path))
        chosen = np.linspace(0, len(frames) - 1, _FRAMES).round().astype(int)
        tiles = [_resized(frames[i], _HEIGHT) for i in chosen.tolist()]
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read as a video: {error}") from error
    return _address(compose_grid(tiles, _FRAMES))


def _of_picture(path: Path) -> str:
    import imageio.v3 as iio

    try:
        return _address(np.asarray(iio.imread(path))[..., :3])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a picture: {error}") from error


def _resized(frame: np.ndarray, to_height: int) -> np.ndarray:
    from PIL import Image

    height, width = frame.shape[:2]
    size = (max(1, round(width * to_height / height)), max(1, to_height))
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX))


def _address(picture: np.ndarray) -> str:
    """Return a picture as a ``data:`` address, JPEG, so that many fit into a page."""
    from PIL import Image

    height, width = picture.shape[:2]
    if width > _WIDEST:
        picture = _resized(picture, round(height * _WIDEST / width))
    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
