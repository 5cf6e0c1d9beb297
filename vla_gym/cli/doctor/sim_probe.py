"""A program: ``settle PACK`` lets a bowl settle, ``speed PACK`` times steps; prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SPEED_SECONDS = 5.0
IMAGE_SIZE = 128
#: "Pick up the black bowl on the ramekin": the task that newer MuJoCo versions spoil.
SETTLE_TASK = ("spatial", 5)
SETTLE_JOINT, SETTLE_BODY = "akita_black_bowl_1_joint0", "akita_black_bowl_1_main"


def settle(pack: str) -> dict[str, Any]:
    """Return how far, in cm, the bowl slides sideways while an official state settles."""
    import mujoco
    import numpy as np

    from vla_gym.sim import LiberoSim
    from vla_gym.suites import get_task
    from vla_gym.suites.libero import load_task_model

    model = load_task_model(get_task(*SETTLE_TASK), pack)
    sim = LiberoSim(model)
    layout = model.official_layout(0)
    scene = mujoco.MjModel.from_binary_path(str(model.mjb_path))
    start = layout.qpos[scene.joint(SETTLE_JOINT).qposadr[0] :][:2]
    sim.reset(layout)
    slid = np.linalg.norm(sim.body_pos(SETTLE_BODY)[:2] - start)
    return {"pack": model.assets.name, "cm": 100 * float(slid), "mujoco": mujoco.__version__}


def speed(pack: str) -> dict[str, Any]:
    """Return control steps a second of one environment, with two images each and without."""
    import gymnasium as gym
    import numpy as np

    import vla_gym  # noqa: F401

    rates = {}
    for name, cameras in (("images", ("agentview", "wrist")), ("states", ())):
        env = gym.make(
            "Libero-goal-v0",
            task_ids=8,
            assets=pack,
            cameras=cameras,
            image_size=IMAGE_SIZE,
            max_control_steps=10**6,  # never over while the clock runs
        )
        env.reset(seed=0)
        action = np.zeros(7, dtype=np.float32)
        env.step(action)
        rates[name] = _rate(lambda env=env, action=action: env.step(action), SPEED_SECONDS / 2)  # type: ignore[misc]
        env.close()
    return {"pack": pack, **rates, "cores": len(os.sched_getaffinity(0))}


def _rate(step: Callable[[], Any], seconds: float) -> float:
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        step()
        count += 1
    return count / passed


def main() -> None:
    """Run the probe that the arguments name."""
    from vla_gym.errors import VlaGymError

    probe = {"settle": settle, "speed": speed}[sys.argv[1]]
    try:
        answer = probe(sys.argv[2])
    except VlaGymError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what counts is out; graphics drivers are known to crash while unloaded


if __name__ == "__main__":
    main()
