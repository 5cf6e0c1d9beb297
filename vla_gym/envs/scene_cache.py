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
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vla_gym.assets import cache_dir
from vla_gym.assets.pack import LIBERO_VARIABLE
from vla_gym.suites import get_suite

if TYPE_CHECKING:
    import numpy as np

    from vla_gym.sim import SceneRenderer
    from vla_gym.suites.protocol import CompiledTask, Simulation, Task

    Images = np.ndarray | Sequence[np.ndarray]

logger = logging.getLogger(__name__)

# Scene, its file (the renderer draws that very model), image size in pixels, profile.
_RendererKey = tuple[str, Path, int, str]

_models: dict[tuple[Task, str, str | None, Path, bool], CompiledTask] = {}


def load_task(task: Task, assets: str | Path, *, clutter: bool = False) -> CompiledTask:
    """Return a compiled task; the first load of a process verifies it, later ones share it.

    Args:
        task: Which task.
        assets: ``"lite"``, ``"libero"``, or a path.
        clutter: With clutter in its scene, see ``Suite.load_task_model``.

    Raises:
        AssetError: If the asset pack is missing or not one.
        CompileError: If the scene cannot be compiled.
    """
    named = assets in ("lite", "libero")
    where = str(assets) if named else str(Path(assets).expanduser().absolute())
    key = (task, where, os.environ.get(LIBERO_VARIABLE), cache_dir(), clutter)
    model = _models.get(key)
    if model is None or not model.mjb_path.exists():  # the cache may be deleted at any time
        suite = get_suite(task.suite)
        model = _models[key] = suite.load_task_model(task, assets, clutter=clutter)
    return model


class _RendererPool:
    """The renderers of one thread, least recently used first.

    A renderer is closed when its last user is gone, or when more than the bound are open; a user
    that still wants an evicted one gets a new one at its next image.
    """

    def __init__(self) -> None:
        self.pid, self._thread = os.getpid(), threading.get_ident()
        self._renderers: OrderedDict[_RendererKey, SceneRenderer] = OrderedDict()
        self._users: dict[_RendererKey, set[object]] = {}
        self._bounds: dict[object, int] = {}
        # Users are collected at any moment, in any thread, even inside a render: closing another
        # context there would take the current one away. They wait here until the lock is free.
        self._gone: deque[object] = deque()
        self._lock = threading.Lock()

    def find(
        self, model: CompiledTask, size: int, profile: str, user: object, bound: int
    ) -> SceneRenderer:
        """Return the shared renderer of a scene; the pool's thread only.

        Args:
            model: Any task of the scene.
            size: Height and width in pixels.
            profile: ``"libero"`` or ``"fast"``.
            user: Who asks; :meth:`release` it once.
            bound: Most renderers that this user lets the pool keep; the most generous user counts.
        """
        from vla_gym.sim import SceneRenderer

        key = (model.scene_key, model.mjb_path, size, profile)
        with self._held():
            self._bounds[user] = bound
            if key not in self._renderers:
                self._renderers[key] = SceneRenderer(model, size, size, profile=profile)
                self._users[key] = set()
                while len(self._renderers) > max(self._bounds.values()):
                    self._drop(next(iter(self._renderers)))
            self._renderers.move_to_end(key)
            self._users[key].add(user)
            return self._renderers[key]

    def render(
        self, renderer: SceneRenderer, sim: Simulation, out: Images, cameras: Sequence[str]
    ) -> None:
        """Render while no renderer of this thread is closed; see ``SceneRenderer.render``."""
        with self._held():
            renderer.render(sim, out, cameras)
        if self._gone:
            self._collect()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        held = self._lock.acquire(blocking=False)  # else this thread has it, further up
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def release(self, user: object) -> None:
        """Forget a user; what nobody else uses is closed, at once where that is safe."""
        self._gone.append(user)
        self._collect()

    def _collect(self) -> None:
        if self._foreign():
            return  # the thread does it at its next image, or at its end
        while self._gone and self._lock.acquire(blocking=False):
            try:
                user = self._gone.popleft()
                self._bounds.pop(user, None)
                for key, users in list(self._users.items()):
                    users.discard(user)
                    if not users:
                        self._drop(key)
            finally:
                self._lock.release()

    def _drop(self, key: _RendererKey) -> None:
        self._users.pop(key)
        try:
            self._renderers.pop(key).close()
        except Exception:
            logger.warning("An OpenGL context could not be freed.", exc_info=True)

    def end(self) -> None:
        """Close everything: the thread ends, and nobody could free its contexts after that."""
        if self.pid != os.getpid():
            _inherited.append(self)
        elif not self._foreign():
            for key in list(self._renderers):
                self._drop(key)

    def _foreign(self) -> bool:
        return threading.get_ident() != self._thread or os.getpid() != self.pid

    def __len__(self) -> int:
        return len(self._renderers)


# Pools of the process that this one was forked from. Their contexts are not ours to free.
_inherited: list[_RendererPool] = []


class _ThreadEnd:
    """Dies in its thread when that ends, and takes the thread's pool along."""


_local = threading.local()


def _pool() -> _RendererPool:
    """Return the pool of this thread."""
    pool: _RendererPool | None = getattr(_local, "pool", None)
    if pool is None or pool.pid != os.getpid():
        pool, end = _RendererPool(), _ThreadEnd()
        weakref.finalize(end, pool.end).atexit = False
        _local.pool, _local.end = pool, end
    return pool


def num_renderers() -> int:
    """Return how many shared renderers the calling thread keeps."""
    return len(_pool())


def _release(pools: list[_RendererPool], user: object) -> None:
    while pools:
        pools.pop().release(user)


class SceneCache:
    """The scenes of one environment; what is least recently used goes first."""

    def __init__(
        self,
        *,
        physics: Literal["fast", "exact"],
        image_size: int,
        visual_profile: Literal["libero", "fast"] | None,
        max_scenes: int,
    ) -> None:
        """Prepare; nothing is built yet.

        Args:
            physics: See ``Suite.make_simulation``.
            image_size: Height and width of images in pixels.
            visual_profile: See :class:`vla_gym.sim.SceneRenderer`; None: ``"libero"`` on the real
                pack, else ``"fast"``.
            max_scenes: Most simulations that are kept, and most shared renderers of this thread.
        """
        self._physics, self._image_size = physics, image_size
        self._visual_profile, self._max_scenes = visual_profile, max_scenes
        self._sims: OrderedDict[tuple[str, Path], Simulation] = OrderedDict()
        self._user, self._pools = object(), list[_RendererPool]()
        # At exit the renderers close themselves, while OpenGL is there still.
        weakref.finalize(self, _release, self._pools, self._user).atexit = False

    def simulation(self, model: CompiledTask) -> Simulation:
        """Return the simulation of the task's scene, set to the task; its state is undefined.

        Raises:
            CompileError: If MuJoCo cannot read the compiled scene.
        """
        key = (model.scene_key, model.mjb_path)
        sim = self._sims.get(key)
        if sim is None:
            sim = self._sims[key] = get_suite(model.task.suite).make_simulation(
                model, self._physics
            )
            if len(self._sims) > self._max_scenes:
                self._sims.popitem(last=False)
        else:
            self._sims.move_to_end(key)
            sim.set_task(model)
        return sim

    def renderer(self, model: CompiledTask) -> SceneRenderer:
        """Return the renderer of the task's scene that this thread's environments share."""
        return self._find(model)[1]

    def render(self, sim: Simulation, out: Images, cameras: Sequence[str]) -> None:
        """Render a simulation; see ``SceneRenderer.render``.

        Raises:
            RenderError: No usable OpenGL context.
        """
        pool, renderer = self._find(sim.task_model)
        pool.render(renderer, sim, out, cameras)

    def _find(self, model: CompiledTask) -> tuple[_RendererPool, SceneRenderer]:
        pool = _pool()
        if pool not in self._pools:
            self._pools.append(pool)
        default = "libero" if model.assets.name == "libero" else "fast"
        profile, size = self._visual_profile or default, self._image_size
        return pool, pool.find(model, size, profile, self._user, self._max_scenes)

    def close(self) -> None:
        """Let go of everything; it is built again when it is needed."""
        self._sims.clear()
        _release(self._pools, self._user)
