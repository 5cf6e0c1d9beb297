"""Draw the pictures and films of docs/gallery.md, and its tables.

Usage: python tools/make_gallery.py [--page-only]

Every task of goal, spatial, object and 10 at its first official state, and four episodes, on
LIBERO's own looks: docs/gallery/SUITE-TASK.webp and docs/gallery/film-SUITE-TASK.webp.
``--page-only`` writes the tables anew from the suites' words alone. Scenes that were never
compiled on this machine take a minute each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from make_variation_picture import tile
from page_blocks import fill_blocks, markdown_table
from PIL import Image

from vla_gym.rollout import ExpertPolicy, Policy, Start
from vla_gym.rollout.film import film
from vla_gym.rollout.video import TileFrames
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym.suites import get_suite, get_task

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gallery.md"
SUITES, COLUMNS, SIZE = ("goal", "spatial", "object", "10"), 5, 256
#: Who plays what: one film each.
FILMS = (("expert", "goal", 3), ("mini", "goal", 8), ("mini", "spatial", 4), ("mini", "object", 0))
#: A film shows every third control step (20 a second), three times as fast as it happened.
FILM_SIZE, EVERY, MILLISECONDS = 176, 3, 50


def main() -> None:
    """Write pictures, films and tables."""
    folder = PAGE.with_suffix("")
    if "--page-only" not in sys.argv[1:]:
        folder.mkdir(exist_ok=True)
        for suite in SUITES:
            for task in get_suite(suite).tasks:
                image = Image.fromarray(tile(suite, task.task_id, 0, None, "libero", SIZE))
                image.save(folder / f"{suite}-{task.task_id}.webp", quality=80, method=6)
        for who, suite, task_id in FILMS:
            policy = ExpertPolicy() if who == "expert" else VLAPolicy(who)
            draw_film(policy, suite, task_id, folder / f"film-{suite}-{task_id}.webp")
    blocks = {}
    for suite in SUITES:
        cells = [
            cell(f"{suite}-{i}", suite, i, f"{i}:") for i in range(len(get_suite(suite).tasks))
        ]
        blocks[suite] = table(cells, COLUMNS)
    films = [cell(f"film-{suite}-{i}", suite, i, f"{suite} {i}, {who}:") for who, suite, i in FILMS]
    fill_blocks(PAGE, {"films": table(films, 2), **blocks})


def draw_film(policy: Policy, suite: str, task_id: int, path: Path) -> None:
    """Film one episode from the first official state.

    Raises:
        SystemExit: If it does not succeed: the page says that it does.
    """
    start = Start.official(suite, task_id, 0)
    [(episode, frames)] = film(policy, [start], size=FILM_SIZE, assets="libero")
    if not episode.success:
        raise SystemExit(f"{policy.name} did not succeed at {start}: film another state.")
    first, *others = (Image.fromarray(frame) for frame in shown(frames))
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=[MILLISECONDS] * len(others) + [1500],
        loop=0,
        quality=45,
        method=6,
    )


def shown(frames: TileFrames) -> list[np.ndarray]:
    """Return every third frame, and the last, which tells the outcome."""
    return [*(frames[i] for i in range(0, len(frames) - 1, EVERY)), frames[len(frames) - 1]]


def cell(name: str, suite: str, task_id: int, label: str) -> str:
    """Return a picture with a task's words below it."""
    words = get_task(suite, task_id).instruction
    return f"![{words}](gallery/{name}.webp)<br>{label} {words}"


def table(cells: list[str], columns: int) -> str:
    """Return the cells as a table of pictures without a head."""
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    return "\n".join(markdown_table([" "] * columns, rows))


if __name__ == "__main__":
    main()
