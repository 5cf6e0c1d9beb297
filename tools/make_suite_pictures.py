"""Draw docs/suites.png: the agent's camera in each suite and each kind of scene, on the lite pack.

Usage: python tools/make_suite_pictures.py [--all] [--assets PACK] [OUT.png]

--all draws one frame of each of the 32 scenes instead (for looking, not for the docs).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
from PIL import Image, ImageDraw

from vla_gym.sim import LiberoSim, SceneRenderer
from vla_gym.suites import SUITES, Task, get_task, suite_tasks
from vla_gym.suites.libero import load_task_model

SIZE, COLUMNS, LABEL = 256, 4, 16
# One task of each suite and of each set of fixtures.
CHOSEN = (
    ("goal", 8),
    ("spatial", 0),
    ("object", 0),
    ("10", 9),
    ("10", 3),
    ("90", 0),
    ("90", 20),
    ("90", 40),
    ("90", 50),
    ("90", 66),
    ("90", 73),
    ("90", 86),
)


def tile(task: Task, assets: str) -> np.ndarray:
    """Return one labelled frame of the task's first official state."""
    task_model = load_task_model(task, assets)
    sim = LiberoSim(task_model)
    sim.reset(task_model.official_layout(0))
    renderer = SceneRenderer(task_model, SIZE, SIZE, profile="libero")
    images = np.empty((2, SIZE, SIZE, 3), np.uint8)
    renderer.render(sim, images)
    renderer.close()
    picture = Image.new("RGB", (SIZE, SIZE + LABEL), "white")
    picture.paste(Image.fromarray(images[0]), (0, LABEL))
    label = f"{task.suite} {task.task_id}: {task.instruction}"
    ImageDraw.Draw(picture).text((2, 2), label[:42], fill="black")
    return np.asarray(picture)


def scene_tasks() -> list[Task]:
    """Return the first task of each scene."""
    first: dict[str, Task] = {}
    for suite in SUITES:
        for task in suite_tasks(suite):
            first.setdefault(task.scene_name, task)
    return list(first.values())


def main() -> None:
    """Write the picture."""
    default = Path(__file__).resolve().parents[1] / "docs" / "suites.png"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", type=Path, default=default)
    parser.add_argument("--all", action="store_true", help="one frame of each scene")
    parser.add_argument("--assets", default="lite", help="asset pack (default: lite)")
    options = parser.parse_args()
    tasks = scene_tasks() if options.all else [get_task(*chosen) for chosen in CHOSEN]
    tiles = [tile(task, options.assets) for task in tasks]
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % COLUMNS)
    rows = [np.concatenate(tiles[i : i + COLUMNS], 1) for i in range(0, len(tiles), COLUMNS)]
    imageio.imwrite(options.out, np.concatenate(rows), optimize=True)


if __name__ == "__main__":
    main()
