"""Compiles the physics loop and the drawing code before tests that run side by side need them."""

from __future__ import annotations

import fcntl
from pathlib import Path

import numpy as np

from vla_gym.envs.scene_cache import load_task
from vla_gym.sim import LiberoSim
from vla_gym.sim.compiled import is_compiled
from vla_gym.sim.model_io import load_shared
from vla_gym.sim.osc_fast import _run
from vla_gym.sim.rendering import painter, software
from vla_gym.sim.rendering.software.draw_scene import draw_scene
from vla_gym.suites import get_task


def _physics() -> None:
    task = load_task(get_task("goal", 0), "lite")
    sim = LiberoSim(task)
    sim.reset(task.official_layout(0))
    sim.run_chunk(np.zeros((1, 7)))


def _drawing() -> None:
    software.preload(load_shared(load_task(get_task("goal", 0), "lite")))


def compile_once(folder: Path, number: int) -> None:
    """Compile what is not yet; processes with an odd ``number`` begin with the other part.

    Args:
        folder: Where the locks are: a process waits for what another one compiles.
        number: Of this process.
    """
    parts = [("physics", _run, _physics)]
    if painter.surely_in_software():
        parts.append(("drawing", draw_scene, _drawing))
    for name, function, compile_it in parts[:: -1 if number % 2 else 1]:
        with open(folder / f"compile-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_compiled(function):
                compile_it()
