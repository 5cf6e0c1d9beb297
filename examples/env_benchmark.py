"""How fast is the environment here? Control steps a second, and the time of a reset.

No policy, no VLA: random action chunks in as many environments as you like.

    python examples/env_benchmark.py
    python examples/env_benchmark.py --num-envs 16 --image-size 128 --assets libero

`vla-gym bench` compares with LIBERO's and Gymnasium's own vector environments.
"""

from __future__ import annotations

import argparse
import time

import gymnasium

import vla_gym  # noqa: F401 - registers the environments

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--num-envs", type=int, default=4)
parser.add_argument("--workers", type=int, default=None, help="default: one a core")
parser.add_argument("--chunk-len", type=int, default=8, help="control steps an action")
parser.add_argument("--image-size", type=int, default=256, help="0: no cameras")
parser.add_argument("--assets", default="lite", help="lite, libero or a path")
parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
options = parser.parse_args()

cameras = {"image_size": options.image_size} if options.image_size else {"cameras": ()}
envs = gymnasium.make_vec(
    "Libero-goal-v0",
    num_envs=options.num_envs,
    workers=options.workers,
    chunk_len=options.chunk_len,
    assets=options.assets,
    **cameras,
)
envs.action_space.seed(0)
began = time.perf_counter()
envs.reset(seed=0)
print(f"first reset (simulations, OpenGL): {time.perf_counter() - began:.2f} s")
began = time.perf_counter()
envs.reset()
print(f"a later reset of all {envs.num_envs}: {time.perf_counter() - began:.3f} s")

control_steps, began = 0, time.perf_counter()
while (elapsed := time.perf_counter() - began) < options.seconds:
    *_, infos = envs.step(envs.action_space.sample())
    # An environment whose episode has ended spends this call on its reset and executes nothing.
    control_steps += int(infos["executed_steps"].sum())
print(f"{control_steps / elapsed:,.0f} control steps/s, {control_steps} in {elapsed:.1f} s")
envs.close()
