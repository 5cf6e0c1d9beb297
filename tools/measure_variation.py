"""Measure what domain variation costs, and whether tasks can be solved with clutter about.

Usage: python tools/measure_variation.py [--assets PACK] [--rounds N]
       python tools/measure_variation.py --experts N [--assets PACK]

Environments with and without variation take turns in one process. With --experts N the scripted
experts play N official states of each task, without and with six distractors.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from vla_gym import DomainVariation
from vla_gym.envs.libero import LiberoEnv
from vla_gym.experts import EXPERT_TASKS, make_expert
from vla_gym.suites import get_task

LEVELS = {
    "none": None,
    "mild": DomainVariation.preset("mild"),
    "strong": DomainVariation.preset("strong"),
    "strong, no distractors": DomainVariation(
        **{**vars(DomainVariation.preset("strong")), "distractors": 0}
    ),
}


def cost(assets: str, rounds: int) -> None:
    """Print medians of reset and step, two cameras of 128 x 128, chunks of 8."""
    envs = {
        name: LiberoEnv(
            "goal",
            task_ids=8,
            assets=assets,
            variation=variation,
            chunk_len=8,
            image_size=128,
            init_states="official",
        )
        for name, variation in LEVELS.items()
    }
    for env in envs.values():  # settle each official state once, load everything
        for _ in range(50):
            env.reset(seed=0 if env.next_episode is None else None)
            env.step(np.zeros((8, 7), np.float32))
    rng, times = np.random.default_rng(0), {name: np.zeros((rounds, 2)) for name in envs}
    for k in range(rounds):
        action = rng.uniform(-1, 1, (8, 7)).astype(np.float32)
        for name, env in envs.items():
            began = time.perf_counter()
            env.reset()
            ready = time.perf_counter()
            env.step(action)
            times[name][k] = ready - began, time.perf_counter() - ready
    for name, found in times.items():
        reset, step = 1e3 * np.median(found, axis=0)
        sys.stdout.write(f"{name:24} reset {reset:6.2f} ms, step of 8 {step:6.2f} ms\n")


def experts(assets: str, states: int) -> None:
    """Print how often the experts succeed, without and with clutter."""
    levels = {"none": None, "clutter": DomainVariation(distractors=6)}
    for suite, tasks in EXPERT_TASKS.items():
        won, shown = dict.fromkeys(levels, 0), 0
        for task_id in tasks:
            for name, variation in levels.items():
                env = LiberoEnv(
                    suite, task_ids=task_id, assets=assets, cameras=(), variation=variation
                )
                for state in range(states):
                    _, info = env.reset(seed=state, options={"init_state_id": state})
                    if variation is not None:
                        shown += len(DomainVariation.describe(info["variation"])["distractors"])
                    expert, over = make_expert(env.sim), False
                    while not over:
                        _, _, terminated, truncated, info = env.step(expert.act())
                        over = terminated or truncated
                    won[name] += int(info["success"])
                env.close()
        played = states * len(tasks)
        sys.stdout.write(
            f"{get_task(suite, 0).suite:8} {played} episodes: {won['none']} solved without, "
            f"{won['clutter']} with {shown / played:.1f} distractors on average\n"
        )
        sys.stdout.flush()


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", default="lite")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--experts", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    if arguments.experts:
        experts(arguments.assets, arguments.experts)
    else:
        cost(arguments.assets, arguments.rounds)


if __name__ == "__main__":
    main()
