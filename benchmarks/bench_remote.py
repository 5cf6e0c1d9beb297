"""What environments on the nodes of a Ray cluster cost, and how far they scale.

    python benchmarks/bench_remote.py overhead        a chunk, beside the same without Ray, paired
    python benchmarks/bench_remote.py overhead-alone  a step of environments that do nothing
    python benchmarks/bench_remote.py scaling         simulators that only sleep
    python benchmarks/bench_remote.py scaling --inference 1   the same, which ask an inference actor
    python benchmarks/bench_remote.py bytes           what travels

Each starts a small cluster on this machine's loopback and ends it.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces

import vla_gym  # noqa: F401  (registers the ids)
from vla_gym.remote.links import Link
from vla_gym.remote.pool import RemotePool
from vla_gym.remote.ray_inference import RayInference
from vla_gym.remote.shards import ThreadHosts
from vla_gym.remote.vector_env import RemoteVectorEnv
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.base import VLAOutput
from vla_gym.wrappers.vector import FrozenVLAObservation

NODE: dict[str, Any] = {
    "node_ip_address": "127.0.0.2",
    "object_store_memory": 150 * 2**20,
    "include_dashboard": False,
}


class SleepingEnv(gym.Env[Any, Any]):
    """What LiberoVLA observes, after a sleep; those of one node sleep at the same time."""

    def __init__(self, index: int, per_node: int, seconds: float, *, frames: bool = False) -> None:
        """Let the first environment of a node sleep for all, as its workers would at once.

        Args:
            index: Of the environment.
            per_node: Environments of a node.
            seconds: Of a chunk.
            frames: Show two frames, as ``mini`` looks at them, in place of token and chunk.
        """
        self._sleep = seconds if index % per_node == 0 else 0.0
        frame = spaces.Box(0, 255, (64, 64, 3), np.uint8)
        tokens = {
            "rl_token": spaces.Box(-np.inf, np.inf, (256,), np.float32),
            "vla_action": spaces.Box(-1.0, 1.0, (8, 7), np.float32),
        }
        self.observation_space = spaces.Dict(
            {
                **({"agentview": frame, "wrist": frame} if frames else tokens),
                "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32),
                "task_id": spaces.Discrete(10),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (8, 7), np.float32)
        self._obs = {key: np.zeros(s.shape, s.dtype) for key, s in self.observation_space.items()}
        self._info = {"success": False, "executed_steps": 8, "elapsed_steps": 8, "discount": 0.9}
        self._info["instruction"] = "open the drawer"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Return zeros."""
        del seed, options
        return self._obs, self._info

    def step(self, action: Any) -> Any:
        """Sleep."""
        del action
        time.sleep(self._sleep)
        return self._obs, 0.0, False, False, self._info


class SleepingVLA:
    """A stand-in whose forward pass takes a GPU's time and no processor."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "sleeping", 8, 1, 256, 64
    model = torch.nn.Identity()
    forward_s = 0.01

    @classmethod
    def from_pretrained(cls, path: Any, **_: Any) -> SleepingVLA:
        """Load nothing."""
        del path
        return cls()

    def infer(self, images: Any, instructions: list[str], proprio: Any) -> VLAOutput:
        """Sleep, and return zeros."""
        del images, proprio
        time.sleep(self.forward_s)
        rows = len(instructions)
        return VLAOutput(torch.zeros(rows, 1, 256), torch.zeros(rows, 8, 7))


@contextmanager
def cluster(nodes: int) -> Iterator[Any]:
    """Start nodes on this machine, and connect to them."""
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 0, **NODE})
    for _ in range(nodes):
        found.add_node(num_cpus=1, resources={"sim": 1}, wait=False, **NODE)
    found.wait_for_nodes()
    ray.init(found.address, log_to_driver=False)
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def overhead(num_envs: int = 8, chunks: int = 10, rounds: int = 6, workers: int = 2) -> None:
    """Step the same environments with and without Ray by turns; print the medians."""
    kwargs: dict[str, Any] = {
        "num_envs": num_envs,
        "chunk_len": 8,
        "assets": "lite",
        "autoreset_mode": "SAME_STEP",
        "workers": workers,
        "task_ids": [3, 7],
    }
    with cluster(1):
        for name in ("LiberoVLA-goal-v0", "Libero-goal-v0"):
            both = [gym.make_vec(name, hosts=hosts, **kwargs) for hosts in (None, "ray")]
            seconds: list[list[float]] = [[], []]
            for envs in both:
                envs.reset(seed=0)
            actions = both[0].action_space.sample() * 0.1
            for turn in range(rounds + 1):
                for k in (0, 1) if turn % 2 else (1, 0):
                    for _ in range(chunks):
                        began = time.perf_counter()
                        both[k].step(actions)
                        if turn:  # the first round warms up
                            seconds[k].append(time.perf_counter() - began)
            local, remote = (1e3 * median(own) for own in seconds)
            tenths = [1e3 * np.quantile(own, 0.1) for own in seconds]
            print(
                f"{name}: {num_envs} envs, n={len(seconds[0])} chunks each: local {local:.1f} "
                f"ms, remote {remote:.1f} ms, {remote - local:+.1f} ms ({remote / local - 1:+.1%})"
                f"; the fastest tenth {tenths[0]:.1f} and {tenths[1]:.1f} ms"
            )
            for envs in both:
                envs.close()


def overhead_alone(num_envs: int = 64, steps: int = 200) -> None:
    """Print the cost of a step of environments that do nothing: messages and tables alone."""
    with cluster(1):
        for hosts in (None, ThreadHosts(1), "ray"):
            factory = partial(SleepingEnv, per_node=num_envs, seconds=0.0)
            kwargs: dict[str, Any] = {"env_factory": factory, "workers": 0}
            envs: Any = (
                LiberoVectorEnv(num_envs, **kwargs)
                if hosts is None
                else RemoteVectorEnv(num_envs, hosts=hosts, **kwargs)
            )
            envs.reset(seed=0)
            actions = np.zeros(envs.action_space.shape, np.float32)
            seconds = []
            for _ in range(steps):
                began = time.perf_counter()
                envs.step(actions)
                seconds.append(time.perf_counter() - began)
            fast, middle = 1e3 * np.quantile(seconds, 0.1), 1e3 * median(seconds)
            name = hosts if isinstance(hosts, str) else type(hosts).__name__
            print(
                f"{num_envs} envs, hosts={name}: {middle:.2f} ms a step, the fastest tenth "
                f"{fast:.2f} ms"
            )
            envs.close()


def scaling(seconds: float = 0.25, nodes: int = 4, steps: int = 30, inference: int = 0) -> None:
    """Print how close sleeping simulators come to stepping as fast as one alone would.

    Args:
        seconds: That a chunk takes.
        nodes: Of the cluster.
        steps: Chunks each.
        inference: Inference actors that are asked for token and chunk, with frames of 64x64; a
            forward pass sleeps 10 ms. 0: the environments show tokens themselves.
    """
    with cluster(nodes):
        served = None
        if inference:
            spec = f"class:bench_remote:SleepingVLA:{tempfile.gettempdir()}"
            served = RayInference(spec, actors=inference, max_rows=256)
        ideal = seconds + (SleepingVLA.forward_s if inference else 0.0)
        for num_envs in (1, 10, 100, 1000):
            per_node = -(-num_envs // nodes)
            factory = partial(
                SleepingEnv, per_node=per_node, seconds=seconds, frames=served is not None
            )
            wrappers = []
            if served is not None:
                wrappers = [partial(FrozenVLAObservation, vla=served.vla(), rl_token=None)]
            envs = RemoteVectorEnv(
                num_envs,
                hosts="ray",
                env_factory=factory,
                vector_wrappers=wrappers,
                workers=0,
                autoreset_mode="SAME_STEP",
            )
            envs.reset(seed=0)
            actions = np.zeros(envs.action_space.shape, np.float32)
            times, cpu = [], time.process_time()
            for _ in range(steps):
                began = time.perf_counter()
                envs.step(actions)
                times.append(time.perf_counter() - began)
            cpu = (time.process_time() - cpu) / steps
            step = median(times[1:])
            print(
                f"{num_envs} simulators on {len(envs.places)} nodes: {1e3 * step:.1f} ms a step of "
                f"{1e3 * ideal:.0f} ms, efficiency {ideal / step:.1%}, driver's CPU "
                f"{1e3 * cpu:.1f} ms a step"
            )
            envs.close()
        if served is not None:
            print(f"inference: {served.stats()}")
            served.close()


def sizes(num_envs: int = 64) -> None:
    """Print the bytes of the two messages of a step."""
    sent: dict[str, int] = {}
    send, take = Link.send, RemotePool._take

    def counted(self: Any, command: str, arguments: Any, ids: Any = ()) -> Any:
        sent["out"] = len(pickle.dumps(arguments, protocol=5)) if command == "run" else 0
        return send(self, command, arguments, ids)

    def taken(self: Any, link: Any, future: Any) -> Any:
        sent["in"] = len(pickle.dumps(future.result(), protocol=5))
        return take(self, link, future)

    Link.send, RemotePool._take = counted, taken  # type: ignore[method-assign]
    for name in ("LiberoVLA-goal-v0", "Libero-goal-v0"):
        envs = gym.make_vec(
            name, num_envs, hosts=ThreadHosts(1), chunk_len=8, assets="lite", workers=1
        )
        envs.reset(seed=0)
        envs.step(np.zeros(envs.action_space.shape, np.float32))
        print(
            f"{name}: {sent['out'] / num_envs:,.0f} bytes out, {sent['in'] / num_envs:,.0f} bytes "
            "in, an environment and chunk"
        )
        envs.close()


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {
            "overhead": overhead,
            "overhead-alone": overhead_alone,
            "scaling": scaling,
            "bytes": sizes,
        }
    )
