"""Cost of an observation's two images: MuJoCo's renderer against the software painter, interleaved.

Both draw the same states one after the other, so that other load on the machine hits both, and the
images are compared. CPU time of the whole process (the software renderer has threads of its own),
medians. With --profile coarse it is the software painter's fast images against its coarse ones,
which are not the same.

    python benchmarks/bench_render.py                                  # the real meshes, 256x256
    python benchmarks/bench_render.py --assets lite --size 128 --profile fast --json result.json
"""

# ruff: noqa: E402 - thread counts and the path must be set before the imports

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("LP_NUM_THREADS", "0")  # see rendering.renderer.without_mesa_threads

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from render_pairs import PainterPair, fixed_camera

from vla_gym.sim import LiberoSim
from vla_gym.sim.model_io import load_shared
from vla_gym.sim.rendering.renderer import CAMERAS
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model


def main() -> None:
    """Time both painters on the same states and print medians and ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", default="libero", help="asset pack (default: libero)")
    parser.add_argument("--task", type=int, default=8, help="task of the goal suite (default: 8)")
    parser.add_argument("--size", type=int, default=256, help="image size (default: 256)")
    parser.add_argument("--profile", choices=["libero", "fast", "coarse"], default="libero")
    parser.add_argument("--states", type=int, default=40, help="states (default: 40)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    model = load_task_model(get_task("goal", options.task), assets=options.assets)
    sim, rng = LiberoSim(model), np.random.default_rng(0)
    fast, coarse = options.profile == "fast", options.profile == "coarse"
    pair = PainterPair(load_shared(model), options.size, fast=fast, coarse=coarse)
    cameras = [fixed_camera(sim._model, name) for name in CAMERAS]
    pixels = np.empty((options.size, options.size, 3), np.uint8)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in CAMERAS}
    triangles: list[int] = []
    for state in range(options.states + 1):
        if state % 8 == 0:
            sim.reset(model.official_layout(state % 50), settle=False)
        sim.run_chunk(rng.uniform(-1, 1, (8, 7)))
        sim.prepare_render()
        for name, camera in zip(CAMERAS, cameras, strict=True):
            plain, software = pair.draw(sim.data, camera)
            if not coarse:
                np.testing.assert_array_equal(plain, software)
            triangles.append(pair.triangles_drawn())
            for which, (context, painter) in enumerate(
                zip(pair.contexts, pair.painters, strict=True)
            ):
                context.make_current()
                begin = time.process_time()
                painter.draw(sim.data, camera, pixels)
                times[name][which].append(1e3 * (time.process_time() - begin))
    pair.close()
    report: dict[str, object] = {
        "assets": options.assets,
        "profile": options.profile,
        "image_size": options.size,
        "states": options.states,
        "mesh_triangles": int(sim._model.mesh_facenum.sum()),
        "mesh_triangles_drawn_an_image": statistics.mean(triangles),
    }
    before, after = ("fast", "coarse") if coarse else ("mujoco", "software")
    for name, (plain_ms, software_ms) in times.items():
        report[f"{name}_ms"] = {
            before: statistics.median(plain_ms[1:]),
            after: statistics.median(software_ms[1:]),
        }
    totals = [
        statistics.median(np.add(*(times[name][which][1:] for name in CAMERAS)))
        for which in range(2)
    ]
    report["both_ms"] = {before: totals[0], after: totals[1]}
    report["times_cheaper"] = totals[0] / totals[1]
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
