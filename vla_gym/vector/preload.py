"""What the process server loads before it forks, so that all workers share it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.envs.scene_cache import load_task
from vla_gym.suites import get_suite, get_task

if TYPE_CHECKING:
    from vla_gym.suites.protocol import CompiledTask

# What every worker imports: done once here, it is shared, too.
_WORKER_MODULES = ("vla_gym.envs.libero", "vla_gym.vector.worker")
_warm = False
WARM_UP_STEPS = 2


def preload(
    tasks: Sequence[tuple[str, int]], assets: str, *, clutter: bool = False, images: bool = True
) -> None:
    """Load some tasks and their scenes; the first time, also run the simulation a little.

    A scene that is not in the cache is compiled, in a process of its own. Where images are surely
    drawn in software, what drawing needs is loaded too.

    Args:
        tasks: Suite and id of each.
        assets: ``"lite"``, ``"libero"`` or a path to LIBERO's assets.
        clutter: Load the scenes with clutter.
        images: Whether the workers are going to draw.

    Raises:
        UnknownTaskError: If a suite or task does not exist.
        AssetError: If the asset pack is missing or not one.
        CompileError: If a scene cannot be compiled or read.
    """
    global _warm
    for suite, task_id in tasks:
        model = load_task(get_task(suite, task_id), assets, clutter=clutter)
        _import_mujoco()
        from vla_gym.sim.model_io import load_shared
        from vla_gym.sim.rendering import painter

        shared = load_shared(model)
        if images:
            painter.preload(shared)
        if not _warm:
            _warm_up(model)
            for name in _WORKER_MODULES:
                importlib.import_module(name)
            _warm = True


def _warm_up(model: CompiledTask) -> None:
    """Run one reset and one chunk: compiled code is loaded now, once, and not in each worker."""
    suite = get_suite(model.task.suite)
    sim = suite.make_simulation(model)
    sim.reset(model.official_layout(0))
    sim.run_chunk(np.tile(suite.action.noop, (WARM_UP_STEPS, 1)))


def _import_mujoco() -> None:
    """Import mujoco without an OpenGL backend, whatever MUJOCO_GL says.

    A backend would load OpenGL's libraries before the fork. Our renderer needs none of it; for a
    user's ``mujoco.Renderer`` a worker gets the wanted one when it asks for it.
    """
    if "mujoco" in sys.modules:
        return
    wanted = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disable"
    try:
        backend = importlib.import_module("mujoco.gl_context")
    finally:
        if wanted is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = wanted

    def late(name: str) -> Any:
        if name != "GLContext" or backend.__dict__.pop("__getattr__", None) is None:
            raise AttributeError(f"module 'mujoco.gl_context' has no attribute {name!r}")
        importlib.reload(backend)
        return backend.GLContext

    vars(backend)["__getattr__"] = late
