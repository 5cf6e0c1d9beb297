"""Compiled models, loaded once a process and shared by every simulation of the same scene."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mujoco

from vla_gym.errors import CompileError

if TYPE_CHECKING:
    from vla_gym.suites.protocol import CompiledTask


logger = logging.getLogger("vla_gym.mujoco")
_T = TypeVar("_T")

# MuJoCo's warnings go to ``logging``; by default it writes MUJOCO_LOG.TXT where we stand. A warning
# is usually an unstable simulation, which MuJoCo resets to its default state, as it does under
# upstream. A handler that the program has set already is kept.
if mujoco.get_mju_user_warning() is None:
    mujoco.set_mju_user_warning(lambda message: logger.warning("MuJoCo: %s", message))


@dataclass
class SharedModel:
    """A model and the lock that its users hold while they write into it or depend on it.

    LIBERO keeps a layout's fixture poses and the colour of a hot stove in the model itself, and so
    do variations of light, cameras, colours and clutter: a simulation writes its own before each
    chunk and each render, and no other one may do so until that is over.

    Attributes:
        model: The model.
        lock: See above.
        derived: What was computed from the model, see :meth:`once`.
        shown: A state for whoever holds the lock: what observations show.
    """

    model: mujoco.MjModel
    lock: threading.RLock = field(default_factory=threading.RLock)
    derived: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], _T]) -> _T:
        """Return what ``make`` returned at the first call with this name; all users share it."""
        with self.lock:
            if name not in self.derived:
                self.derived[name] = make()
            found: _T = self.derived[name]
            return found

    @property
    def shown(self) -> mujoco.MjData:
        """See the class."""
        return self.once("shown", lambda: mujoco.MjData(self.model))


_Key = tuple[str, Path]

# Models in use, by scene; and the latest ones with the sizes of their files, which stay when nobody
# uses them. LIBERO's 32 scenes take 4 GB with the real meshes, 0.1 GB with the lite pack.
_shared: weakref.WeakValueDictionary[_Key, SharedModel] = weakref.WeakValueDictionary()
_latest: OrderedDict[_Key, tuple[SharedModel, int]] = OrderedDict()
_MAX_LATEST_BYTES = 1_500_000_000
_shared_lock = threading.Lock()


def load_shared(task_model: CompiledTask) -> SharedModel:
    """Return the process-wide model of a scene with its lock.

    It is one object as long as somebody holds it. Models that nobody holds stay as long as the
    latest ones together are within 1.5 GB, and are read again after that.

    Raises:
        CompileError: If MuJoCo cannot read the compiled model.
    """
    path = Path(task_model.mjb_path)
    key = (task_model.scene_key, path)
    with _shared_lock:
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = SharedModel(_read(path))
        _keep(key, shared, path)
        return shared


def _keep(key: _Key, shared: SharedModel, path: Path) -> None:
    """Remember a model as the latest, and forget the oldest ones that are too many."""
    if key in _latest:
        _latest.move_to_end(key)
        return
    size = path.stat().st_size if path.exists() else 0  # the cache may be deleted at any time
    _latest[key] = (shared, size)
    while len(_latest) > 1 and sum(size for _, size in _latest.values()) > _MAX_LATEST_BYTES:
        _latest.popitem(last=False)


def _read(path: Path) -> mujoco.MjModel:
    try:
        return mujoco.MjModel.from_binary_path(str(path))
    except Exception as error:
        # Without a manifest the folder counts as damaged, whatever its checksums say.
        with contextlib.suppress(OSError):
            path.with_name("manifest.json").unlink()
        raise CompileError(
            f"MuJoCo {mujoco.__version__} cannot read the compiled scene {path}: {error}. Start "
            "again: it is built anew. If that does not help, the disk may be full or damaged; "
            "VLA_GYM_CACHE names a folder on another one."
        ) from error
