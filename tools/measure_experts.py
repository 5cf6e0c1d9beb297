"""Measure the scripted experts, and make the tables of docs/experts.md of the counts.

Usage: python tools/measure_experts.py [--suites spatial object goal 10] [--task-ids 0 1 ...]
           [--assets lite libero] [--states official sampled] [--episodes 50] [--render-only]

Counts go to docs/experts.json, one row per (suite, task, pack, states), and the tables are made
anew as soon as a task is finished; rows with as many episodes are skipped unless --again is given.

``official``: LIBERO's first n initial states, actions undisturbed. ``sampled``: fresh layouts with
the start and action noise of ``vla-gym demos``, so the rate is the yield of a recording.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from page_blocks import fill_blocks, markdown_table, rate, read_rows, write_rows

from vla_gym.demos.config import DemosConfig
from vla_gym.experts import EXPERT_TASKS
from vla_gym.rollout import ExpertPolicy, Start, play
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.suites import get_task
from vla_gym.suites.libero import TaskModel, load_task_model
from vla_gym.suites.libero.tasks import NUM_INIT_STATES

DOCS = Path(__file__).parent.parent / "docs"
COUNTS, PAGE = DOCS / "experts.json", DOCS / "experts.md"
PACKS, STATES = ("lite", "libero"), ("official", "sampled")
# Not the seed of any recorded data set, nor one that the experts were tuned on.
SAMPLED_SEED = 1000
Row = dict[str, Any]
KEY = ("suite", "task_id", "assets", "states")
SUMMARY = ("suite", "states", "pack", "tasks", "n", "success", "mean over the tasks")


def measure(task_model: TaskModel, states: str, episodes: int) -> Row:
    """Play ``episodes`` episodes of one task and count."""
    task = task_model.task
    official = states == "official"
    seed = None if official else 0
    starts = [Start.number(i, task.suite, task.task_id, None, seed) for i in range(episodes)]
    noisy = functools.partial(NoisyEpisodes, seed=SAMPLED_SEED, noise=DemosConfig().noise)
    played = play(
        ExpertPolicy(),
        starts,
        num_envs=1,
        workers=0,
        assets=task_model.assets.name,
        env_wrappers=[] if official else [noisy],
    )
    outcomes = [episode.length if episode.success else None for episode in played]
    steps = [outcome for outcome in outcomes if outcome is not None]
    return {
        "suite": task.suite,
        "task_id": task.task_id,
        "assets": task_model.assets.name,
        "states": states,
        "n": episodes,
        "successes": len(steps),
        "mean_steps": round(float(np.mean(steps)), 1) if steps else None,
        "failed": [i for i, outcome in enumerate(outcomes) if outcome is None],
    }


def blocks(rows: list[Row]) -> dict[str, str]:
    """Return the page's tables by the names of their blocks."""
    found = _by_key(rows)
    columns = [(s, a) for s in STATES for a in PACKS if any(key[2:] == (a, s) for key in found)]
    table = []
    for suite, task_id in sorted({key[:2] for key in found}):
        cells = [found.get((suite, task_id, assets, states)) for states, assets in columns]
        name = f"{suite} {task_id}: {get_task(suite, task_id).instruction}"
        table.append([name, *("" if row is None else _cell(row) for row in cells)])
    tasks = markdown_table(["task", *(f"{states}, `{a}`" for states, a in columns)], table)
    summary = markdown_table(SUMMARY, _summary(rows))
    return {"summary": "\n".join(summary), "tasks": "\n".join(tasks)}


def _summary(rows: list[Row]) -> Iterator[list[str]]:
    for states, assets in itertools.product(STATES, PACKS):
        own = [row for row in rows if (row["states"], row["assets"]) == (states, assets)]
        for suite in [*sorted({row["suite"] for row in rows}), "all"]:
            chosen = [row for row in own if suite in (row["suite"], "all")]
            if chosen:
                successes, n = (sum(row[key] for row in chosen) for key in ("successes", "n"))
                mean = np.mean([row["successes"] / row["n"] for row in chosen])
                counts = [str(len(chosen)), str(n), rate(successes, n), f"{100 * mean:.1f} %"]
                yield [suite, states, f"`{assets}`", *counts]


def _by_key(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    return {tuple(row[name] for name in KEY): row for row in rows}


def _cell(row: Row) -> str:
    steps = "" if row["mean_steps"] is None else f", {row['mean_steps']:.0f} steps"
    return rate(row["successes"], row["n"]) + steps


def main() -> None:
    """Measure what is asked for and missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", default=list(EXPERT_TASKS), choices=EXPERT_TASKS)
    parser.add_argument("--task-ids", nargs="+", type=int)
    parser.add_argument("--assets", nargs="+", default=["lite"], choices=PACKS)
    parser.add_argument("--states", nargs="+", default=["official"], choices=STATES)
    parser.add_argument("--episodes", type=int, default=NUM_INIT_STATES)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--render-only", action="store_true")
    args = parser.parse_args()
    if not 1 <= args.episodes <= NUM_INIT_STATES:
        parser.error(f"--episodes: expected 1 to {NUM_INIT_STATES}, got {args.episodes}")
    todo = [
        (suite, task_id, assets, states)
        for states in args.states
        for assets in args.assets
        for suite in args.suites
        for task_id in args.task_ids or EXPERT_TASKS[suite]
    ]
    for key in [] if args.render_only else todo:
        done = _by_key(read_rows(COUNTS)).get(key)
        if done and done["n"] >= args.episodes and not args.again:
            continue
        suite, task_id, assets, states = key
        row = measure(load_task_model(get_task(suite, task_id), assets), states, args.episodes)
        # Read anew: another run may have measured other tasks meanwhile.
        rows = _by_key([*read_rows(COUNTS), row])
        write_rows(COUNTS, [rows[k] for k in sorted(rows)])
        fill_blocks(PAGE, blocks(read_rows(COUNTS)))
        line = f"{suite} {task_id} {assets} {states}: {_cell(row)} failed: {row['failed']}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
    fill_blocks(PAGE, blocks(read_rows(COUNTS)))


if __name__ == "__main__":
    main()
