"""What the process server loads before it forks, so that all workers share it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.envs.scene_cache import SceneCache, load_task
from vla_gym.errors import RenderError
from vla_gym.suites import get_suite, get_task

if TYPE_CHECKING:
    from vla_gym.suites.protocol import CompiledTask

# What every worker imports: done once here, it is shared, too.
_WORKER_MODULES = ("vla_gym.envs.libero", "vla_gym.vector.worker")
_warm = False
WARM_UP_STEPS = 2
# Keep renderers open for workers to come, by scenes and arguments of SceneCache; the latest alone,
# say of training and evaluation: each holds hundreds of megabytes. None: it cannot be shared.
_open: dict[Any, SceneCache | None] = {}
_MAX_OPEN = 2

logger = logging.getLogger(__name__)


def preload(
    tasks: Sequence[tuple[str, int]],
    assets: str,
    *,
    clutter: bool = False,
    images: bool = True,
    drawing: Mapping[str, Any] | None = None,
) -> None:
    """Load some tasks and their scenes; the first time, also run the simulation a little.

    A scene that is not in the cache is compiled, in a process of its own. Where images are surely
    drawn in software, what drawing needs is loaded too; and with ``drawing`` the renderers are
    opened, if all scenes fit into the cache: a scene's textures take hundreds of megabytes, which
    the workers then share.

    Args:
        tasks: Suite and id of each.
        assets: ``"lite"``, ``"libero"`` or a path to LIBERO's assets.
        clutter: Load the scenes with clutter.
        images: Whether the workers are going to draw.
        drawing: How they do: arguments of ``SceneCache``; None: open no renderer.

    Raises:
        UnknownTaskError: If a suite or task does not exist.
        AssetError: If the asset pack is missing or not one.
        CompileError: If a scene cannot be compiled or read.
    """
    global _warm
    scenes: dict[Any, CompiledTask] = {}
    for suite, task_id in tasks:
        model = load_task(get_task(suite, task_id), assets, clutter=clutter)
        scenes[model.scene_key, model.mjb_path] = model
        _import_mujoco()
        from vla_gym.sim.model_io import load_shared
        from vla_gym.sim.rendering import painter

        shared = load_shared(model)
        if images:
            profile = (drawing or {}).get("visual_profile")
            painter.preload(shared, coarse=profile == "coarse")
        if not _warm:
            _warm_up(model)
            for name in _WORKER_MODULES:
                importlib.import_module(name)
            _warm = True
    if drawing is not None:
        _open_renderers(scenes, drawing)


def _open_renderers(scenes: Mapping[Any, CompiledTask], drawing: Mapping[str, Any]) -> None:
    """Open the renderers of scenes, if a fork of them draws as well as they do."""
    from vla_gym.sim.rendering import fork_safety, painter

    key = (*scenes, *drawing.items())
    if painter.has_gpu() or len(scenes) > drawing["max_scenes"]:
        return
    if key in _open:
        _open[key] = _open.pop(key)
        return
    cache, size = SceneCache(**drawing), drawing["image_size"]
    try:
        for model in scenes.values():
            suite = get_suite(model.task.suite)
            sim = suite.make_simulation(model)
            sim.reset(model.sample_layout(np.random.default_rng(0)))
            images = np.empty((len(suite.cameras), size, size, 3), np.uint8)
            with fork_safety.without_shader_cache():
                cache.render(sim, images, tuple(suite.cameras.values()))
            problem = fork_safety.obstacle()
            if problem:
                raise RenderError(f"OpenGL has {problem}")
    except RenderError as error:
        # The workers open their own, and say what is wrong if they can't.
        logger.info("Workers do not share renderers: %s", error)
        cache.close()
        _open[key] = None
        if not any(_open.values()):
            fork_safety.end_display()
        return
    cache.share_with_forks()
    _open[key] = cache
    shared = [(key, cache) for key, cache in _open.items() if cache is not None]
    for key, cache in shared[:-_MAX_OPEN]:
        del _open[key]
        cache.close()


def _warm_up(model: CompiledTask) -> None:
    """Run one reset and one chunk: compiled code is loaded now, once, and not in each worker."""
    suite = get_suite(model.task.suite)
    sim = suite.make_simulation(model)
    sim.reset(model.sample_layout(np.random.default_rng(0)))
    sim.run_chunk(np.tile(suite.action.noop, (WARM_UP_STEPS, 1)))


def _import_mujoco() -> None:
    """Import mujoco without an OpenGL backend, whatever MUJOCO_GL says.

    A backend would load OpenGL's libraries where nothing draws. Our renderer needs none of it; for
    a user's ``mujoco.Renderer`` a worker gets the wanted one when it asks for it.
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
