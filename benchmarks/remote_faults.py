"""Nodes and actors of a Ray cluster die at random while environments play or a trainer learns.

    python benchmarks/remote_faults.py envs --minutes 10
    python benchmarks/remote_faults.py training --minutes 10 --command td3 --preset td3_demo ...

Each starts a cluster of three nodes on this machine's loopback and ends it. `envs` accounts for
every episode and compares those that were not lost with the same ones played without Ray;
`training` also kills the trainer, which goes on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import tyro
from bench_remote import NODE, cluster

import vla_gym  # noqa: F401  (registers the ids)

_LATE_S = 300.0  # for a step, with everything that has to come up again
Episode = tuple[int, int, bool, bytes]


def parts() -> list[psutil.Process]:
    """Return the processes of the actors that simulate."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if "ray::PartActor" in " ".join(p.info["cmdline"] or ())]


@contextmanager
def killing(nodes: Any, every: float, seed: int) -> Iterator[Counter[str]]:
    """Kill an actor or a node every so often until the block ends; give how many were.

    A node comes back five seconds later.
    """
    # Its hooks are signal handlers, which only the main thread may set: nodes that come back
    # have none, and end with the cluster.
    nodes._shutdown_at_exit = False
    rng, over, killed = random.Random(seed), threading.Event(), Counter[str]()

    def run() -> None:
        while not over.wait(every):
            if rng.random() < 0.5 and (found := parts()):
                rng.choice(found).send_signal(signal.SIGKILL)
                killed["actors"] += 1
            else:
                node = rng.choice(list(nodes.worker_nodes))
                nodes.remove_node(node, allow_graceful=False)
                killed["nodes"] += 1
                over.wait(5.0)
                nodes.add_node(num_cpus=1, resources={"sim": 1}, wait=False, **NODE)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def play(envs: Any, more: Callable[[list[list[Episode | None]]], bool]) -> list[list[Any]]:
    """Return the episodes of each environment in order, None: lost.

    The actions are drawn by environment and episode: the VLA's would differ in the last bit with
    the number of environments that it sees at once.
    """
    ended: list[list[Episode | None]] = [[] for _ in range(envs.num_envs)]
    envs.reset(seed=3)
    while more(ended):
        drawn = [np.random.default_rng((i, len(own))) for i, own in enumerate(ended)]
        actions = [rng.uniform(-0.3, 0.3, envs.single_action_space.shape) for rng in drawn]
        _, _, terminated, truncated, infos = envs.step(np.array(actions, np.float32))
        for i in np.flatnonzero(terminated | truncated):
            final = infos["final_info"]
            if final.get("worker_restarted", np.zeros(envs.num_envs, bool))[i]:
                ended[i].append(None)
                continue
            told = (int(final[key][i]) for key in ("task_id", "elapsed_steps"))
            last = np.asarray(infos["final_obs"][i]["proprio"])
            ended[i].append((*told, bool(terminated[i]), last.tobytes()))
    return ended


def envs(minutes: float = 10.0, every: float = 20.0, num_envs: int = 6, seed: int = 0) -> None:
    """Play LiberoVLA on a cluster that is killed piece by piece; compare with a quiet machine."""
    kwargs: dict[str, Any] = {
        "num_envs": num_envs,
        "assets": "lite",
        "autoreset_mode": "SAME_STEP",
        "max_control_steps": 48,
        "task_ids": [1, 5, 8],
        "workers": 1,
    }
    warnings.simplefilter("ignore")
    before = set(psutil.pids())
    with cluster(3) as nodes:
        both = gym.make_vec("LiberoVLA-goal-v0", hosts="ray", step_timeout=_LATE_S, **kwargs)
        end = time.monotonic() + 60 * minutes
        with killing(nodes, every, seed) as killed:
            found = play(both, lambda _: time.monotonic() < end)
        both.close()
    both = gym.make_vec("LiberoVLA-goal-v0", **kwargs)
    want = [len(own) for own in found]
    expected = play(both, lambda own: any(len(e) < n for e, n in zip(own, want, strict=True)))
    both.close()
    pairs = {
        (i, k): (mine, right)
        for i, (own, quiet) in enumerate(zip(found, expected, strict=True))
        for k, (mine, right) in enumerate(zip(own, quiet, strict=False))
    }
    kept = {at: pair for at, pair in pairs.items() if pair[0] is not None}
    report = {
        "killed": dict(killed),
        "episodes": len(pairs),
        "lost": [at for at in pairs if at not in kept],
        "equal_to_the_quiet_ones": sum(mine == right for mine, right in kept.values()),
        "unlike": [
            (at, mine[:3], right[:3]) for at, (mine, right) in kept.items() if mine != right
        ],
        "processes_left": left(before),
    }
    print(json.dumps(report))
    assert len(kept) == report["equal_to_the_quiet_ones"], "an episode is not what it should be"


def left(before: set[int]) -> list[str]:
    """Return the commands of processes of ours that are still there after half a minute."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        mine = psutil.Process().children(recursive=True)
        mine += [p for p in psutil.process_iter() if p.pid not in before and _is_ray(p)]
        if not mine:
            return []
        time.sleep(1)
    return [" ".join(p.cmdline())[:80] for p in mine]


def _is_ray(process: psutil.Process) -> bool:
    try:
        return any("ray::" in word or "raylet" in word for word in process.cmdline())
    except psutil.Error:
        return False


def training(
    command: tyro.conf.UseAppendAction[list[str]],
    run_dir: Path,
    minutes: float = 10.0,
    every: float = 20.0,
    trainer_every: float = 150.0,
    seed: int = 0,
) -> None:
    """Train on such a cluster; the trainer is killed as well, and begun again with --auto-resume.

    Args:
        command: Words of the command after ``vla-gym-train``, one --command each.
        run_dir: Of the run.
        minutes: After which the trainer may end by itself; it is interrupted (Ctrl-C) then.
        every: Seconds between two kills of a node or an actor.
        trainer_every: Seconds between two kills of the trainer.
        seed: Of the choices.
    """
    before, starts = set(psutil.pids()), 0
    with cluster(3) as nodes:
        environ = {**os.environ, "RAY_ADDRESS": nodes.address}
        words = [sys.executable, "-m", "vla_gym_trainers.cli", *command, "--hosts", "ray"]
        words += ["--run-dir", str(run_dir), "--auto-resume", "--no-progress"]
        end = time.monotonic() + 60 * minutes
        with killing(nodes, every, seed) as killed:
            while (rest := end - time.monotonic()) > 0:
                trainer = subprocess.Popen(words, env=environ)
                starts += 1
                try:
                    code = trainer.wait(min(rest, trainer_every))
                except subprocess.TimeoutExpired:
                    last = end - time.monotonic() <= 0
                    trainer.send_signal(signal.SIGINT if last else signal.SIGKILL)
                    trainer.wait(_LATE_S)
                else:
                    print(f"the trainer ended by itself, status {code}")
                    break
    print(json.dumps({"killed": dict(killed), "starts": starts, "left": left(before)}))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"envs": envs, "training": training})
