"""Draw docs/scene.png: both cameras of the goal scene on the lite pack, amid an episode.

Usage: python tools/make_scene_picture.py [OUT.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from vla_gym.envs.libero import LiberoEnv
from vla_gym.experts import make_expert
from vla_gym.sim import SceneRenderer

TASK_ID, CONTROL_STEPS, SIZE = 8, 58, 384  # the bowl is on its way to the plate


def main(path: Path) -> None:
    """Write the picture to ``path``."""
    env = LiberoEnv("goal", task_ids=TASK_ID, cameras=())
    env.reset(seed=0, options={"init_state_id": 0})
    expert = make_expert(env.sim)
    for _ in range(CONTROL_STEPS):
        env.step(expert.act())
    renderer = SceneRenderer(env.task_model, SIZE, SIZE, profile="libero")
    images = np.empty((2, SIZE, SIZE, 3), np.uint8)
    renderer.render(env.sim, images)
    imageio.imwrite(path, np.concatenate(list(images), axis=1), optimize=True)
    renderer.close()
    env.close()


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "docs" / "scene.png"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
