"""A known start, played under an evaluation protocol and compared with what it should show.

The numbers and pictures to compare with are in ``known_episodes.json``, for each asset pack and
protocol; ``python -m vla_gym.cli.known_episode`` writes them anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

KNOWN = Path(__file__).with_name("known_episodes.json")
TASK_ID, INIT_STATE_ID = 8, 0  # of libero_goal: put the bowl on the plate
#: Forward and down, turning, while the hand closes.
ACTIONS = 16 * [[0.3, -0.2, -0.5, 0.1, 0.0, 0.3, 1.0]]
#: Largest differences of joints and objects (m, rad), and of a block's mean colour (0..255).
STATE_TOLERANCE, COLOUR_TOLERANCE = 1e-4, 1.0


def play(protocol: str, pack: str) -> dict[str, Any]:
    """Play the start with fixed actions.

    Args:
        protocol: One of ``vla_gym.suites.libero.protocols``.
        pack: Asset pack.

    Returns:
        ``qpos`` after them; ``images``: of the first and the last observation, two cameras each,
        the mean colours of 8 x 8 blocks; ``renderer``.
    """
    import numpy as np

    from vla_gym.envs.libero import LiberoEnv
    from vla_gym.suites.libero.protocols import PROTOCOLS

    rules = PROTOCOLS[protocol]  # type: ignore[index]
    env = LiberoEnv(
        "goal",
        task_ids=TASK_ID,
        assets=pack,
        chunk_len=len(ACTIONS),
        image_size=rules.image_size or 256,
        **rules.env_kwargs(),
    )
    first, _ = env.reset(seed=0, options={"init_state_id": INIT_STATE_ID})
    shown = [first[camera].copy() for camera in env.cameras]
    last, *_ = env.step(np.array(ACTIONS, np.float32))
    shown += [last[camera] for camera in env.cameras]
    return {
        "qpos": np.round(env.sim.qpos, 6).tolist(),
        "images": blocks_of(np.stack(shown)).tolist(),
        "renderer": env.render_facts()["gl_renderer"],
    }


def blocks_of(images: np.ndarray) -> np.ndarray:
    """Return the mean colours (N, 8, 8, 3) of blocks of images (N, S, S, 3), rounded."""
    side = images.shape[1] // 8
    blocks = images.reshape(-1, 8, side, 8, side, 3).mean(axis=(2, 4))
    return blocks.round().astype(int)


def judge(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[bool, str]:
    """Compare an episode with the known one; return whether it is the same, and in words."""
    import numpy as np

    away = float(np.abs(np.subtract(found["qpos"], wanted["qpos"])).max())
    text = f"joints and objects within {away:.0e} of the known ones"
    if away > STATE_TOLERANCE:
        return False, f"joints and objects up to {away:.2g} (m, rad) away from the known ones"
    if "llvmpipe" not in found["renderer"]:
        return True, f"{text}; images not compared: {found['renderer']} draws, known are llvmpipe's"
    colour = float(np.abs(np.subtract(found["images"], wanted["images"])).max())
    if colour > COLOUR_TOLERANCE:
        return False, f"{text}, but images differ by up to {colour:.0f} of 255"
    return True, f"{text}, images within {colour:.0f} of 255"


def main() -> None:
    """Write the known episodes of both packs, as this machine plays them."""
    known = {
        pack: {name: play(name, pack) for name in ("openvla", "openpi", "libero")}
        for pack in ("lite", "libero")
    }
    KNOWN.write_text(json.dumps(known, separators=(",", ":")) + "\n", encoding="utf-8")
    sys.stdout.write(f"{KNOWN}\n")


if __name__ == "__main__":
    main()
