"""Scenes that environments keep ready, so that going back to one costs a look-up.

A simulation belongs to one environment. A renderer, whose OpenGL context holds a copy of the scene
(hundreds of megabytes with LIBERO's meshes), is shared by all environments of a thread that draw
the same scene in the same size and profile: an OpenGL context can be used in one thread only.
Compiled tasks are shared by the whole process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vla_gym.assets import cache_dir
from vla_gym.assets.pack import LIBERO_VARIABLE
from vla_gym.suites import get_suite

if TYPE_CHECKING:
    import numpy as np

    from vla_gym.sim import SceneRenderer
    from vla_gym.suites.protocol import CompiledTask, Simulation, Task

    Images = np.ndarray | Sequence[np.ndarray]

logger = logging.getLogger(__name__)

#: How images are drawn, see :class:`vla_gym.sim.SceneRenderer`.
VisualProfile = Literal["libero", "fast", "coarse"]
# Scene, its file (the renderer draws that very model), image size in pixels, profile.
_RendererKey = tuple[str, Path, int, str]
_GEOMETRY = "geometry"  # in place of a profile: depth and geom ids

_models: dict[tuple[Task, str | Path, str | None, Path, bool], CompiledTask] = {}


def load_task(task: Task, assets: str | Path, *, clutter: bool = False) -> CompiledTask:
    """Return a compiled task; the first load of a process verifies it, later ones share it.

    Arguments are those of ``Suite.load_task_model``; a path is absolute.

    Raises:
        AssetError: If the asset pack is missing or not one.
        CompileError: If the scene cannot be compiled.
    """
    key = (task, assets, os.environ.get(LIBERO_VARIABLE), cache_dir(), clutter)
    model = _models.get(key)
    if model is None or not model.mjb_path.exists():  # the cache may be deleted at any time
        suite = get_suite(task.suite)
        model = _models[key] = suite.load_task_model(task, assets, clutter=clutter)
    return model


class _User:
    """Stands for an environment: what it uses stays open while this lives.

    What a pinned one uses counts for nobody's limit and is not evicted.
    """

    def __init__(self, max_renderers: int) -> None:
        self.max_renderers, self.pinned = max_renderers, False
        # At exit the renderers close themselves, while OpenGL is there still.
        # Those of other threads are closed at their next images.
        weakref.finalize(self, lambda: _pool().close_unused()).atexit = False


class _RendererPool:
    """The renderers of one thread, least recently used first; they end with the thread.

    If they are inheritable, a fork of the process goes on with its copies.

    A renderer is closed when its last user is gone, or when more are open than the most generous
    user wants; a user that still wants an evicted one gets a new one at its next image. Users go at
    any moment, in any thread, even inside a render, and closing a renderer changes the thread's
    current context: nothing is closed but by :meth:`close_unused`, when nobody renders.
    """

    def __init__(self) -> None:
        self.pid, self.inheritable = os.getpid(), False
        self.renderers: OrderedDict[_RendererKey, SceneRenderer] = OrderedDict()
        self._users: weakref.WeakKeyDictionary[_User, set[_RendererKey]]
        self._users = weakref.WeakKeyDictionary()
        self._busy = False

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keep what is open, whoever goes meanwhile."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def find(self, key: _RendererKey, model: CompiledTask, user: _User) -> SceneRenderer:
        """Return the renderer of a scene, and remember who uses it."""
        from vla_gym.sim import SceneRenderer
        from vla_gym.sim.rendering.geometry import GeometryRenderer

        with self.busy():
            self._users.setdefault(user, set()).add(key)
            if key not in self.renderers:
                _, _, size, profile = key
                if profile == _GEOMETRY:
                    self.renderers[key] = GeometryRenderer(model, size, size)
                else:
                    self.renderers[key] = SceneRenderer(model, size, size, profile=profile)
                self._evict()
            self.renderers.move_to_end(key)
            return self.renderers[key]

    def _evict(self) -> None:
        pinned = set().union(*(keys for user, keys in self._users.items() if user.pinned))
        keys = [key for key in self.renderers if key not in pinned]
        limit = max((user.max_renderers for user in self._users if not user.pinned), default=0)
        for key in keys[: max(0, len(keys) - limit)]:
            self._close(key)

    def close_unused(self) -> None:
        """Close what nobody uses any more, unless a renderer of this thread is at work."""
        if not self._busy:
            with self.busy():
                used = set().union(*self._users.values())
                for key in self.renderers.keys() - used:
                    self._close(key)

    def _close(self, key: _RendererKey) -> None:
        for keys in self._users.values():
            keys.discard(key)
        try:
            self.renderers.pop(key).close()
        except Exception:
            logger.warning("An OpenGL context could not be freed.", exc_info=True)


_local = threading.local()
# Pools of the process that this one was forked from. Their contexts are not ours to free.
_foreign: list[_RendererPool] = []


def _pool() -> _RendererPool:
    """Return the pool of this thread."""
    pool: _RendererPool | None = getattr(_local, "pool", None)
    if pool is not None and pool.pid != os.getpid():
        if pool.inheritable:
            pool.pid, pool.inheritable = os.getpid(), False
        else:
            _foreign.append(pool)
            pool = None
    if pool is None:
        pool = _local.pool = _RendererPool()
    return pool


class SceneCache:
    """The scenes of one environment; what is least recently used goes first."""

    def __init__(
        self,
        *,
        image_size: int,
        visual_profile: VisualProfile | None,
        max_scenes: int,
        **how: Any,
    ) -> None:
        """Prepare; nothing is built yet.

        Args:
            image_size: Height and width of images in pixels.
            visual_profile: See :class:`vla_gym.sim.SceneRenderer`; None: ``"libero"`` on the real
                pack, else ``"fast"``.
            max_scenes: Most simulations that are kept, and most shared renderers of this thread.
            **how: Further arguments of ``Suite.make_simulation``.
        """
        self._how, self._image_size = how, image_size
        self._visual_profile, self._max_scenes = visual_profile, max_scenes
        self._sims: OrderedDict[tuple[str, Path], Simulation] = OrderedDict()
        self._user = _User(max_scenes)

    def simulation(self, model: CompiledTask) -> Simulation:
        """Return the simulation of the task's scene, set to the task; its state is undefined.

        Raises:
            CompileError: If MuJoCo cannot read the compiled scene.
        """
        key = (model.scene_key, model.mjb_path)
        sim = self._sims.get(key)
        if sim is None:
            sim = self._sims[key] = get_suite(model.task.suite).make_simulation(model, **self._how)
            if len(self._sims) > self._max_scenes:
                self._sims.popitem(last=False)
        else:
            self._sims.move_to_end(key)
            sim.set_task(model)
        return sim

    def renderer(self, model: CompiledTask) -> SceneRenderer:
        """Return the renderer of the task's scene that this thread's environments share."""
        default = "libero" if model.assets.name == "libero" else "fast"
        profile = self._visual_profile or default
        key = (model.scene_key, model.mjb_path, self._image_size, profile)
        return _pool().find(key, model, self._user)

    def render(self, sim: Simulation, out: Images, cameras: Sequence[str]) -> None:
        """Render a simulation; see ``SceneRenderer.render``.

        Raises:
            RenderError: No usable OpenGL context.
        """
        pool = _pool()
        with pool.busy():
            self.renderer(sim.task_model).render(sim, out, cameras)
        pool.close_unused()

    def render_geometry(
        self, sim: Simulation, cameras: Sequence[str]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return depth and geom ids; see ``GeometryRenderer.render_geometry``.

        Raises:
            RenderError: No usable OpenGL context.
        """
        self._user.max_renderers = 2 * self._max_scenes  # two of each scene
        pool, model = _pool(), sim.task_model
        key = (model.scene_key, model.mjb_path, self._image_size, _GEOMETRY)
        with pool.busy():
            renderer: Any = pool.find(key, model, self._user)
            found: list[tuple[np.ndarray, np.ndarray]] = renderer.render_geometry(sim, cameras)
        pool.close_unused()
        return found

    def share_with_forks(self) -> None:
        """Let processes that this thread forks go on with its renderers, see ``fork_safety``.

        These stay open, whatever other caches of the thread and of its forks open and close.
        """
        self._user.pinned = _pool().inheritable = True

    def close(self) -> None:
        """Let go of everything; it is built again when it is needed."""
        self._sims.clear()
        self._user = _User(self._max_scenes)
