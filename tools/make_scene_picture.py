"""Draw docs/scene.png: both cameras of the goal scene on the lite pack, amid an episode.

Usage: python tools/make_scene_picture.py [OUT.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from vla_gym.envs.libero import LiberoEnv
from vla_gym.rollout.workers import ExpertActs

TASK_ID, CONTROL_STEPS, SIZE = 8, 58, 384  # the bowl is on its way to the plate


def main(path: Path) -> None:
    """Write the picture to ``path``."""
    how = {"chunk_len": CONTROL_STEPS, "image_size": SIZE, "visual_profile": "libero"}
    env = ExpertActs(LiberoEnv("goal", task_ids=TASK_ID, **how))
    env.reset(seed=0, options={"init_state_id": 0})
    seen, *_ = env.step(np.zeros(env.action_space.shape, np.float32))
    picture = np.concatenate([seen["agentview"], seen["wrist"]], axis=1)
    imageio.imwrite(path, picture, optimize=True)
    env.close()


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "docs" / "scene.png"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
