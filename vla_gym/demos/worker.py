"""What a worker process of ``vla-gym demos`` does: play one attempt, write what came of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_gym.demos.files import write_part
from vla_gym.experts.recording import Episode, episode_rng, record_episode
from vla_gym.sim import LiberoSim, SceneRenderer
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model
from vla_gym.variation import DomainVariation
from vla_gym.variation.drawn import part


@dataclass(frozen=True)
class Attempt:
    """One attempt; what comes of it depends on these values alone."""

    suite: str
    task_id: int
    number: int
    seed: int
    noise: float
    assets: str
    image_size: int
    variation: str | None = None


def start_worker() -> None:
    """Prepare a worker process: it leaves Ctrl-C to its parent, and ends when that has died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def record_attempt(attempt: Attempt, folder: Path) -> bool:
    """Play an attempt and leave its mark in ``folder``.

    Returns:
        Whether the expert reached the goal.
    """
    episode = play_attempt(attempt)
    if episode is None:
        failed_mark(folder, attempt.number).touch()
        return False
    sim, _ = _studio(attempt)
    write_part(part_path(folder, attempt.number), episode, sim.task_model, sim.variation)
    return True


def part_path(folder: Path, number: int) -> Path:
    """Return the file of a successful attempt."""
    return folder / f"{number:05d}.hdf5"


def failed_mark(folder: Path, number: int) -> Path:
    """Return the empty file that says that an attempt failed."""
    return folder / f"{number:05d}.failed"


def play_attempt(attempt: Attempt) -> Episode | None:
    """Play an attempt in this process; None if the expert did not reach the goal."""
    sim, renderer = _studio(attempt)
    size = attempt.image_size

    def render() -> np.ndarray:
        frame = np.empty((2, size, size, 3), np.uint8)
        renderer.render(sim, frame)
        return frame

    variation = DomainVariation.parse(attempt.variation)
    if variation is not None:
        vector, placing = variation.draw(attempt.seed, attempt.number)
        if variation.distractors:
            part(vector, "distractors")[:] = sim.place_distractors(variation.distractors, placing)
        sim.set_variation(vector)
    rng = episode_rng(attempt.seed, sim.task_model, attempt.number)
    return record_episode(sim, render, rng, noise=attempt.noise)


_Studio = tuple[LiberoSim, SceneRenderer]
# Simulation and renderer of the last task: a worker plays many attempts of a task in a row, and
# more than one scene with LIBERO's meshes would fill the memory.
_studios: dict[tuple[str, int, str, int, str | None], _Studio] = {}


def _studio(attempt: Attempt) -> _Studio:
    key = (
        attempt.suite,
        attempt.task_id,
        attempt.assets,
        attempt.image_size,
        attempt.variation,
    )
    if key not in _studios:
        close_studio()
        variation = DomainVariation.parse(attempt.variation)
        task_model = load_task_model(
            get_task(attempt.suite, attempt.task_id),
            attempt.assets,
            clutter=variation is not None and variation.distractors > 0,
        )
        # As the environments show the scene by default.
        profile = "libero" if task_model.assets.name == "libero" else "fast"
        size = attempt.image_size
        renderer = SceneRenderer(task_model, size, size, profile=profile)
        _studios[key] = LiberoSim(task_model), renderer
    return _studios[key]


def close_studio() -> None:
    """Free this process's renderer."""
    for _, renderer in _studios.values():
        renderer.close()
    _studios.clear()
