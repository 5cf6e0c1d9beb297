"""Collect a VLA's hidden states: from demonstrations in files, and from played episodes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from vla_gym.demos.files import read_episodes, read_instruction
from vla_gym.demos.worker import start_worker
from vla_gym.errors import ConfigError, WorkerError
from vla_gym.experts.recording import episode_rng
from vla_gym.suites import SUITES, Task, suite_tasks
from vla_gym.vla import FrozenVLA, load
from vla_gym.vla.preprocess import area_downsample
from vla_gym_trainers.cloning.data import demo_files
from vla_gym_trainers.rl_token.vla_states import (
    PLAYERS,
    Stage,
    StatesConfig,
    VLAStates,
    infer_hidden,
    play_expert,
    play_vla,
)

_PLAY = {"expert": play_expert, "vla": play_vla}
# Players see different layouts, and others than `vla-gym demos` with the same seed.
_FIRST_SEED = {"expert": 20_000, "vla": 30_000}
# Longest wait for a job per episode in it, in seconds; one takes about one.
EPISODE_DEADLINE = 600.0


def states_of_demos(vla: FrozenVLA, folder: str | Path, stride: int) -> VLAStates:
    """Let the VLA look at every ``stride``-th frame of demonstrations.

    Args:
        vla: The VLA.
        folder: Folder below which the files are, or one file.
        stride: Frames from one look to the next.

    Raises:
        ConfigError: If there are no demonstrations, or images that are not the VLA's size nor a
            multiple of it.
    """
    tasks = {task.instruction: task.key for s in reversed(SUITES) for task in suite_tasks(s)}
    parts = []
    for path in tqdm(demo_files(folder), desc="states of demonstrations", unit="task"):
        for images, proprio, instruction in _demo_episodes(path, vla.image_size):
            images, proprio = images[::stride], proprio[::stride]
            count = len(images)
            parts.append(
                VLAStates(
                    hidden=infer_hidden(vla, images, instruction, proprio),
                    proprio=proprio,
                    object_pos=np.full((count, 3), np.nan),
                    task=np.zeros(count, np.int64),
                    player=np.full(count, PLAYERS.index("demos")),
                    episode=np.zeros(count, np.int64),
                    tasks=[tasks.get(instruction, instruction)],
                )
            )
    return VLAStates.joined(parts)


def _demo_episodes(path: Path, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    instruction = read_instruction(path)
    for images, proprio, _ in read_episodes(path):
        if images.shape[2] % size:
            raise ConfigError(
                f"{path} has {images.shape[2]}-pixel images, the VLA looks at {size}: record "
                f"demonstrations with 'vla-gym demos --image-size {size}', or use "
                "expert_episodes."
            )
        yield area_downsample(images, size), proprio, instruction


@dataclass(frozen=True)
class _Job:
    """Some episodes of one task, played by one player."""

    task: Task
    player: str
    episodes: int
    seed: int
    noise: float
    stride: int
    assets: str


def states_of_episodes(
    vla: str | FrozenVLA, config: StatesConfig, device: str = "cpu"
) -> VLAStates:
    """Play the episodes that the config asks for.

    With ``num_workers > 0`` subprocesses are spawned: a script that calls this needs the usual
    ``if __name__ == "__main__"`` guard.

    Args:
        vla: Name or folder of the VLA, or the VLA itself (only without workers).
        config: Which episodes.
        device: Torch device on which a VLA given by name is loaded.

    Raises:
        ConfigError: If a value is out of range, no episode is asked for, or workers are asked for
            with a VLA that has no name.
        WorkerError: If a worker dies or hangs.
    """
    config.check()
    jobs = [
        _Job(task, player, count, _FIRST_SEED[player] + config.seed, noise, stride, config.assets)
        for task in config.tasks()
        for player, count, noise, stride in (
            ("expert", config.expert_episodes, config.expert_noise, config.frame_stride),
            ("vla", config.rollout_episodes, config.rollout_noise, 1),
        )
        if count
    ]
    model = load(vla, device=device) if isinstance(vla, str) else vla
    results: Iterator[list[VLAStates]]
    if not config.num_workers:
        results = (_play(model, job) for job in jobs)
    elif isinstance(vla, str):
        results = _play_in_workers(vla, device, jobs, config.num_workers)
    else:
        raise ConfigError("Workers load the VLA themselves: give its name, or num_workers=0.")
    parts: list[VLAStates] = []
    total = sum(job.episodes for job in jobs)
    with tqdm(total=total, desc="states of episodes", unit="episode") as bar:
        for states in results:
            parts += states
            bar.update(len(states))
    return VLAStates.joined(parts)


def _play_in_workers(
    vla: str, device: str, jobs: list[_Job], count: int
) -> Iterator[list[VLAStates]]:
    """Yield the jobs' results in their order.

    Raises:
        WorkerError: If a worker dies or hangs.
    """
    others = set(multiprocessing.active_children())
    # Spawn: a fork after EGL or a GPU was initialised is fatal.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=_start_worker, initargs=(vla, device)
    )
    try:
        futures = [pool.submit(_play_in_worker, job) for job in jobs]
        for job, future in zip(jobs, futures, strict=True):
            yield future.result(timeout=EPISODE_DEADLINE * job.episodes)
    except BrokenProcessPool as error:
        raise WorkerError(
            "A process that played episodes died (out of memory?): use fewer num_workers."
        ) from error
    except FutureTimeoutError as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # or the pool would wait for it for ever
        raise WorkerError(
            f"An episode took longer than {EPISODE_DEADLINE:.0f} s: workers hang."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_vla: FrozenVLA | None = None


def _start_worker(vla: str, device: str) -> None:
    """Prepare a worker process: one thread, a VLA of its own."""
    global _worker_vla
    start_worker()
    torch.set_num_threads(1)
    _worker_vla = load(vla, device=device)


def _play_in_worker(job: _Job) -> list[VLAStates]:
    assert _worker_vla is not None
    return _play(_worker_vla, job)


def _play(vla: FrozenVLA, job: _Job) -> list[VLAStates]:
    stage = Stage(job.task, vla.image_size, job.assets)
    try:
        return [
            _PLAY[job.player](
                stage,
                vla,
                episode_rng(job.seed, stage.sim.task_model, number),
                job.noise,
                job.stride,
            )
            for number in range(job.episodes)
        ]
    finally:
        stage.close()
