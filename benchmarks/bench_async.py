"""Asynchronous against synchronous collection with a slow VLA, in one run.

    python benchmarks/bench_async.py --factors 1 5 --updates 6

The embedded VLA is slowed down by sleeping: a forward pass of the acting policy takes `factor`
times what the environments need to simulate a chunk, and a learning step twice that, as on an
accelerator that is not this CPU. So the gain shows what overlapping can give when acting and
learning do not compete for one device; where they do, it is smaller.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_gym import vla
from vla_gym.suites import get_task
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.lora import LoraSettings
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.policy import ValueHead
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.student import trainable_copy
from vla_gym_trainers.on_policy.targets import ppo_targets, rollout_metrics
from vla_gym_trainers.on_policy.vla_policy import TokenPolicy
from vla_gym_trainers.rollout.pipeline import Pipeline


class SlowPolicy(TokenPolicy):
    """Sleeps as long as a slow network would compute."""

    act_seconds = 0.0

    def act(self, *inputs: Any) -> Any:
        """Act, slowly."""
        time.sleep(self.act_seconds)
        return super().act(*inputs)

    def distribution(self, *inputs: Any) -> Any:
        """Learn, twice as slowly: forward and backward."""
        if torch.is_grad_enabled():
            time.sleep(2.0 * self.act_seconds)
        return super().distribution(*inputs)


def run(args: argparse.Namespace, envs: LiberoVectorEnv, pause: float, ahead: bool) -> dict:
    """Time some updates; return seconds an update and the staleness histogram."""
    base = vla.load("mini")
    torch.manual_seed(0)
    student, _ = trainable_copy(base, "lora", lora=LoraSettings(exclude=("action_head",)))
    policy = SlowPolicy(student, value_head=ValueHead(base.hidden_size))
    policy.act_seconds = pause
    chunks = math.ceil(get_task("goal", args.task).max_control_steps / base.horizon)
    collector, acting = RolloutCollector(envs), policy.copy() if ahead else policy
    buffers = [Rollout(policy, args.num_envs, chunks, 1) for _ in range(2)]

    def collect(parameters: dict[str, Any], index: int) -> Rollout:
        acting.load_state_dict(parameters)
        return collector.collect(acting, buffers[index % 2], seed=index)

    config = PPOConfig(micro_batch_size=args.num_envs, learning_rate=1e-6)
    learner, ages, seconds = Learner(policy, config), Counter[int](), []
    played: dict[str, float] = {}
    with Pipeline(
        collect, policy.state_dict, ahead=int(ahead), deadline=3600.0, limit=args.updates
    ) as pipeline:
        for _ in range(args.updates):
            began = time.perf_counter()
            collected = pipeline.next()
            rollout = collected.block
            played = rollout_metrics(rollout)
            ages[collected.staleness] += int(played["rollout/chunks"])
            targets = ppo_targets(rollout, 0.95)
            learner.update(rollout, targets.advantages, targets.keep, targets.returns)
            pipeline.publish()
            seconds.append(time.perf_counter() - began)
    # The first update has nothing to overlap with, in either way.
    return {
        "seconds_per_update": round(float(np.mean(seconds[1:])), 3),
        "staleness_chunks": {str(k): v for k, v in sorted(ages.items())},
        "chunks": played["rollout/chunks"],
    }


def simulation_seconds(envs: LiberoVectorEnv) -> float:
    """Return the seconds of a chunk of all environments."""
    envs.reset(seed=0)
    actions = np.zeros(envs.action_space.shape, np.float32)
    began = time.perf_counter()
    for _ in range(5):
        envs.step(actions)
    return (time.perf_counter() - began) / 5


def main() -> None:
    """Run all factors, synchronous and asynchronous in turn, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--task", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    envs = LiberoVectorEnv(
        args.num_envs,
        "goal",
        task_ids=args.task,
        chunk_len=8,
        image_size=128,
        gamma=1.0,
        autoreset_mode="SAME_STEP",
    )
    chunk = simulation_seconds(envs)
    rows = []
    for factor in args.factors:
        row: dict[str, Any] = {"factor": factor, "chunk_seconds": round(chunk, 4)}
        row["synchronous"] = run(args, envs, factor * chunk, ahead=False)
        row["asynchronous"] = run(args, envs, factor * chunk, ahead=True)
        one, two = (row[x]["seconds_per_update"] for x in ("synchronous", "asynchronous"))
        row["gain"] = round(one / two, 3)
        rows.append(row)
    envs.close()
    text = json.dumps(rows, indent=2)
    sys.stdout.write(text + "\n")
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
