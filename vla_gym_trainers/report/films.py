"""Film strips of a run or card: what ``vla-gym eval --films`` and ``--videos`` left."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.rollout.video import FPS, HOLD_SECONDS, compose_grid
from vla_gym_trainers.evaluation.cards import EvalCard, films_folder
from vla_gym_trainers.report.data import Run

# Frames of a strip that is cut out of a video, and the width of one in pixels.
_FRAMES, _WIDTH = 6, 230
#: Which task or episode, then name and ``data:`` address of each picture: before and after, or one.
Strip = tuple[str, list[tuple[str, str]]]


def strips_of(
    runs: Sequence[Run], cards: Sequence[tuple[str, EvalCard]], limit: int
) -> tuple[list[Strip], list[str]]:
    """Return at most ``limit`` strips of each run and card, and a sentence about what has none."""
    found = [(run.name, _of_run(run, limit)) for run in runs]
    found += [(name, _of_card(name, card, limit)) for name, card in cards]
    strips = [strip for _, own in found for strip in own]
    missing = [name for name, own in found if not own and limit]
    if not missing:
        return strips, []
    advice = "train with --videos, or evaluate with --films"
    return strips, [f"No films: {', '.join(missing)} ({advice})."]


def _of_run(run: Run, limit: int) -> list[Strip]:
    """Return the strips of a run's ``videos/``, of the VLA and of the policy."""
    strips: list[Strip] = []
    for before in sorted((run.path / "videos").glob("*_vla.mp4"))[:limit]:
        name = before.name.removesuffix("_vla.mp4")
        pictures = [("VLA", _of_video(before))]
        if (after := before.with_name(f"{name}_policy.mp4")).is_file():
            pictures.append(("policy", _of_video(after)))
        strips.append((f"{run.name}: {name}", pictures))
    return strips


def _of_card(name: str, card: EvalCard, limit: int) -> list[Strip]:
    """Return the strips of an evaluation beside those of the one it is paired with."""
    paired = card.content["results"].get("paired", {}).get("with")
    # It may have been moved since: its counts are in this card, its films are not.
    earlier = {} if paired is None else _films_beside(Path(paired))
    strips: list[Strip] = []
    for place, file in list(_films_beside(card.path).items())[:limit]:
        before = [("before", _of_video(earlier[place]))] if place in earlier else []
        pictures = [*before, ("after" if before else "film", _of_video(file))]
        strips.append((f"{name}: {place.replace('_', ' ')}", pictures))
    return strips


def _films_beside(card: Path) -> dict[str, Path]:
    """Return the films of ``vla-gym eval --films`` by task and state."""
    films = sorted(films_folder(card).glob("*.mp4"))
    return {file.stem.rpartition("_")[0]: file for file in films}


def _of_video(path: Path) -> str:
    """Return a strip of a video as a ``data:`` address, JPEG, so that many fit into a page."""
    import imageio.v3 as iio
    from PIL import Image

    try:
        frames = list(iio.imiter(path))
        last = max(0, len(frames) - 1 - round(HOLD_SECONDS * FPS))
        chosen = np.linspace(0, last, _FRAMES).round().astype(int)
        tiles = [Image.fromarray(frames[i]) for i in chosen.tolist()]
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read as a video: {error}") from error
    size = (_WIDTH, max(1, round(tiles[0].height * _WIDTH / tiles[0].width)))
    small = [np.asarray(tile.resize(size, Image.Resampling.BOX)) for tile in tiles]
    file = BytesIO()
    Image.fromarray(compose_grid(small, _FRAMES)).save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
