"""Draw docs/variation.png: what each kind of domain variation does, on several tasks.

Usage: python tools/make_variation_picture.py [--assets PACK] [--level LEVEL] [OUT.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
from PIL import Image, ImageDraw

from vla_gym import DomainVariation
from vla_gym.envs.libero import LiberoEnv

SIZE, LABEL = 144, 14
TASKS = (("goal", 8), ("goal", 8), ("spatial", 0), ("object", 0), ("10", 4), ("90", 0), ("10", 5))
ROWS = {
    "none": (),
    "light": ("light_intensity", "light_color", "light_direction"),
    "cameras": (
        "camera_position",
        "camera_rotation",
        "camera_fov",
        "wrist_position",
        "wrist_rotation",
    ),
    "surfaces": ("table_color", "floor_color", "wall_color"),
    "objects": ("object_color",),
    "distractors": ("distractors",),
    "all": tuple(vars(DomainVariation())),
}


def tile(
    suite: str,
    task_id: int,
    seed: int,
    variation: DomainVariation | None,
    assets: str,
    size: int = SIZE,
) -> np.ndarray:
    """Return the agent's view of a task's first official state, with a variation."""
    env = LiberoEnv(
        suite,
        task_ids=task_id,
        assets=assets,
        image_size=size,
        cameras=("agentview",),
        visual_profile="libero",
        variation=variation,
    )
    observation, _ = env.reset(seed=seed, options={"init_state_id": 0})
    env.close()
    return np.asarray(observation["agentview"])


def picture(level: str, assets: str) -> np.ndarray:
    """Return the grid: a row for each kind, a column for each task."""
    full, rows = vars(DomainVariation.preset(level)), []
    for name, fields in ROWS.items():
        variation = DomainVariation(**{field: full[field] for field in fields})
        tiles = [tile(*task, seed, variation, assets) for seed, task in enumerate(TASKS)]
        title = Image.new("RGB", (SIZE * len(TASKS), LABEL), "white")
        ImageDraw.Draw(title).text((2, 1), name, fill="black")
        rows += [np.asarray(title), np.hstack(tiles)]
    return np.vstack(rows)


def main() -> None:
    """Draw and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", default="lite")
    parser.add_argument("--level", default="strong")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/variation.png"))
    arguments = parser.parse_args()
    image = Image.fromarray(picture(arguments.level, arguments.assets))
    # 256 colours keep the file small.
    imageio.imwrite(arguments.out, np.asarray(image.quantize(256, dither=0).convert("RGB")))


if __name__ == "__main__":
    main()
