"""Speed of the simulation layer against upstream LIBERO, interleaved in one run.

Each round times upstream and this package one after the other on the same actions, so that other
load on the machine hits both; the figures are medians over rounds. Both run on one core, upstream
in a child process (``tests/upstream.py``).

    python benchmarks/bench_sim.py                     # the real meshes; see the README
    python benchmarks/bench_sim.py --assets lite --rounds 5 --json result.json

What is asked for: a control step without cameras in at most 0.35 of upstream's time, a chunk of 8
with two 256x256 cameras at 5 or more times upstream's control steps a second, a reset with
cameras 15 or more times as fast.
"""

# ruff: noqa: E402 - thread counts and the path must be set before the imports

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("LP_NUM_THREADS", "0")  # see rendering.renderer.without_mesa_threads

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from upstream import Upstream

from vla_gym.sim import LiberoSim, SceneRenderer
from vla_gym.suites import get_task
from vla_gym.suites.libero import TaskModel, load_task_model

CLOCKS = {"wall": "perf_counter", "cpu": "process_time"}
CHUNK = 8
STATE_STEPS = 40


def timed(clock: str, function: Callable[..., Any], *args: Any) -> float:
    """Return the seconds that a call takes by a clock of the time module."""
    now = getattr(time, clock)
    begin = now()
    function(*args)
    return now() - begin


def each(function: Callable[[np.ndarray], Any], values: np.ndarray) -> None:
    """Call a function on every row."""
    for value in values:
        function(value)


def bench_steps(model: TaskModel, upstream: Upstream, rounds: int, clock: str) -> dict[str, float]:
    """Time control steps without cameras, alone and in chunks of 8; milliseconds."""
    upstream.build(model.task.suite, model.task.task_id)
    rng = np.random.default_rng(0)
    sim, times = LiberoSim(model), {"upstream": [], "step": [], "chunk": []}
    layout = model.official_layout(0)
    for _ in range(rounds + 1):
        actions = rng.uniform(-0.6, 0.6, (STATE_STEPS, 7))
        upstream.start(layout, model.fixtures)
        times["upstream"].append(upstream.timed_steps(actions, clock) / STATE_STEPS)
        sim.reset(layout, settle=False)
        times["step"].append(timed(clock, each, sim.step, actions) / STATE_STEPS)
        sim.reset(layout, settle=False)
        chunks = actions.reshape(-1, CHUNK, 7)
        times["chunk"].append(timed(clock, each, sim.run_chunk, chunks) / STATE_STEPS)
    return {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}


def bench_cameras(
    model: TaskModel, upstream: Upstream, rounds: int, size: int, clock: str
) -> dict[str, float]:
    """Time chunks of 8 with an observation; milliseconds a control step.

    Upstream renders at every control step: it has no way to skip one.
    """
    rng = np.random.default_rng(1)
    sim = LiberoSim(model)
    renderers = {
        name: SceneRenderer(model, size, size, profile=name) for name in ("libero", "fast")
    }
    images = np.empty((2, size, size, 3), np.uint8)
    layout = model.official_layout(0)
    times: dict[str, list[float]] = {"upstream": [], "libero": [], "fast": []}

    def play(renderer: SceneRenderer, actions: np.ndarray) -> None:
        sim.run_chunk(actions)
        renderer.render(sim, images)
        sim.proprio()

    for _ in range(rounds + 1):
        actions = rng.uniform(-0.6, 0.6, (CHUNK, 7))
        upstream.start(layout, model.fixtures)
        times["upstream"].append(upstream.timed_steps(actions, clock) / CHUNK)
        for name, renderer in renderers.items():
            sim.reset(layout, settle=False)
            times[name].append(timed(clock, play, renderer, actions) / CHUNK)
    for renderer in renderers.values():
        renderer.close()
    return {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}


def bench_resets(
    model: TaskModel, upstream: Upstream, rounds: int, size: int, clock: str
) -> dict[str, float]:
    """Time resets that end with both images; seconds.

    ``upstream`` is env.reset() and set_init_state; ``upstream_settled`` adds the ten no-op steps
    that an evaluation runs. Ours are settled: a fresh official state, one seen before in this
    process, and a sampled layout.
    """
    sim = LiberoSim(model)
    renderer = SceneRenderer(model, size, size, profile="libero")
    images, rng = np.empty((2, size, size, 3), np.uint8), np.random.default_rng(2)
    times: dict[str, list[float]] = {
        name: [] for name in ("upstream", "upstream_settled", "first", "again", "sampled")
    }

    def ours(layout: Any) -> None:
        sim.reset(layout)
        renderer.render(sim, images)

    for index in range(rounds + 1):
        plain, settled = upstream.timed_reset(model.init_states[index], clock)
        times["upstream"].append(plain)
        times["upstream_settled"].append(settled)
        official, sampled = model.official_layout(index), model.sample_layout(rng)
        times["first"].append(timed(clock, ours, official))
        times["again"].append(timed(clock, ours, official))
        times["sampled"].append(timed(clock, ours, sampled))
    renderer.close()
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Run all comparisons and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", default="libero", help="asset pack (default: libero)")
    parser.add_argument("--task", type=int, default=8, help="task of the goal suite (default: 8)")
    parser.add_argument("--size", type=int, default=256, help="image size (default: 256)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="wall time, or CPU time on a machine that has other work (default: wall)",
    )
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    model = load_task_model(get_task("goal", options.task), assets=options.assets)
    with Upstream(model.assets.root) as upstream:
        steps = bench_steps(model, upstream, options.rounds, clock)
        upstream.build("goal", options.task, image_size=options.size)
        cameras = bench_cameras(model, upstream, options.rounds, options.size, clock)
        resets = bench_resets(model, upstream, max(3, options.rounds // 2), options.size, clock)
    renderer = SceneRenderer(model, 16, 16)
    report = {
        "assets": options.assets,
        "clock": options.clock,
        "renderer": renderer.renderer_info(),
        "image_size": options.size,
        "step_ms": steps,
        "step_with_cameras_ms": cameras,
        "reset_s": resets,
        "ratios": {
            "state-only step, of upstream's time (<= 0.35)": steps["step"] / steps["upstream"],
            "state-only chunk, of upstream's time": steps["chunk"] / steps["upstream"],
            "chunk of 8 with cameras, times upstream's rate (>= 5)": cameras["upstream"]
            / cameras["libero"],
            "the same, fast profile": cameras["upstream"] / cameras["fast"],
            "settled official reset, times as fast (>= 15)": resets["upstream_settled"]
            / resets["first"],
            "the same state again": resets["upstream_settled"] / resets["again"],
            "settled sampled reset, times as fast": resets["upstream_settled"] / resets["sampled"],
            "official reset against upstream's without no-ops": resets["upstream"]
            / resets["first"],
            "sampled reset against upstream's without no-ops": resets["upstream"]
            / resets["sampled"],
        },
    }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
