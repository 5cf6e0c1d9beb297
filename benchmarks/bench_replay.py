"""Speed of the replay ring against a list of per-transition tensor tuples, interleaved.

    python benchmarks/bench_replay.py --capacity 50000

Both are full, hold the same transitions (RL token 256, VLA chunk 8 x 7, proprio 8, task) and return
the same batch: tensors by key. The list drops its oldest entry by ``pop(0)``, draws with
``random.choices`` and stacks. A round is what TD3+BC does per vector step: push one transition per
environment, then draw ``--utd`` batches per transition.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from vla_gym_trainers.td3.replay import ChunkReplayBuffer

BOX = {"rl_token": (256,), "vla_action": (8, 7), "proprio": (8,)}
SPACE = spaces.Dict(
    {
        **{key: spaces.Box(-np.inf, np.inf, shape, np.float32) for key, shape in BOX.items()},
        "task_id": spaces.Discrete(10),
    }
)
ACTION = spaces.Box(-1.0, 1.0, (8, 7), np.float32)


class TupleList:
    """The usual list: one tuple of tensors a transition."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items: list[tuple[torch.Tensor, ...]] = []

    def add(self, obs: Any, after: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Push one transition per environment."""
        for i, info in enumerate(infos):
            if len(self.items) >= self.capacity:
                self.items.pop(0)
            row = [torch.tensor(part[key][i]) for part in (obs, after) for key in obs]
            numbers = (reward[i], float(done[i]), info["discount"], float("nan"))
            row += [torch.tensor(action[i].reshape(-1)), *(torch.tensor([n]) for n in numbers)]
            self.items.append(tuple(row))

    def sample(self, size: int) -> list[torch.Tensor]:
        """Return a batch, key by key."""
        rows = random.choices(self.items, k=size)
        return [torch.stack(column) for column in zip(*rows, strict=True)]


def transitions(n_envs: int, rng: np.random.Generator) -> tuple[Any, ...]:
    """Return the arguments of ``add`` for one vector step."""

    def obs() -> dict[str, np.ndarray]:
        made = {key: rng.normal(size=(n_envs, *s)).astype(np.float32) for key, s in BOX.items()}
        return made | {"task_id": rng.integers(10, size=n_envs)}

    action = rng.normal(size=(n_envs, 8, 7)).astype(np.float32)
    done = rng.random(n_envs) < 0.05
    infos = [{"discount": 0.96, "executed_steps": 8} for _ in range(n_envs)]
    return obs(), obs(), action, np.zeros(n_envs, np.float32), done, infos


def seconds(function: Any, times: int) -> float:
    """Return seconds per call."""
    started = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - started) / times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capacity", type=int, default=50_000)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--utd", type=float, default=2.0, help="batches per transition")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    steps = [transitions(args.num_envs, rng) for _ in range(64)]
    ring = ChunkReplayBuffer(args.capacity, SPACE, ACTION, "cpu", args.num_envs, seed=0)
    balanced = ChunkReplayBuffer(
        args.capacity, SPACE, ACTION, "cpu", args.num_envs, seed=0, balanced=True
    )
    rivals: dict[str, Any] = {
        "list": TupleList(args.capacity),
        "ring": ring,
        "ring, balanced": balanced,
    }
    for buffer in rivals.values():
        for k in range(-(-args.capacity // args.num_envs) + 1):
            buffer.add(*steps[k % len(steps)])
    times: dict[str, dict[str, list[float]]] = {name: {"push": [], "sample": []} for name in rivals}
    for _ in range(args.repeats):
        for name, buffer in rivals.items():
            few = name == "list"
            push = seconds(lambda b=buffer: [b.add(*s) for s in steps], 1 if few else 5)
            times[name]["push"].append(push / (len(steps) * args.num_envs))
            draw = seconds(lambda b=buffer: b.sample(args.batch_size), 20 if few else 200)
            times[name]["sample"].append(draw)
    report: dict[str, Any] = {"config": vars(args), "torch": torch.__version__}
    base: dict[str, float] = {}
    for name, parts in times.items():
        push, draw = (statistics.median(parts[key]) for key in ("push", "sample"))
        row = {"push_us": 1e6 * push, "sample_us": 1e6 * draw}
        row["transition_us"] = row["push_us"] + args.utd * row["sample_us"]
        base = base or dict(row)
        row |= {f"{key}_ratio": base[key] / row[key] for key in base}
        report[name] = {key: round(value, 2) for key, value in row.items()}
    if args.json:
        print(json.dumps(report))
        return
    print(f"{'':15s} {'push':>10s} {'draw 256':>10s} {'all':>10s}   (us; ratio to the list)")
    for name in times:
        row = report[name]
        text = " ".join(f"{row[f'{k}_us']:10.1f}" for k in ("push", "sample", "transition"))
        ratio = " ".join(f"{row[f'{k}_us_ratio']:6.1f}x" for k in ("push", "sample", "transition"))
        print(f"{name:15s} {text}   {ratio}")


if __name__ == "__main__":
    main()
