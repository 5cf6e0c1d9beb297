"""What LIBERO's compile process is asked for, and everything that its result depends on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from vla_gym.errors import CompileError
from vla_gym.suites.disk_cache import SceneRequest
from vla_gym.suites.libero.tasks import LiberoTask

_LIBERO_DISTRIBUTIONS = ("rlinf-libero", "libero", "hf-libero")
_COMPILER_SOURCES = ("compile_scene.py", "extract.py", "initial_state.py", "upstream_env.py")
_CLUTTER_SOURCES = ("compile_clutter.py",)  # besides these


@dataclass(frozen=True)
class LiberoSceneRequest(SceneRequest):
    """A scene of LIBERO, see :mod:`vla_gym.suites.libero.compile_scene`.

    Attributes:
        tasks: All tasks of the scene.
    """

    tasks: tuple[LiberoTask, ...]

    def inputs(self) -> dict[str, Any]:
        """Return what the compiled scene depends on besides the asset pack and the machine."""
        return {
            "compiler": _digest(_COMPILER_SOURCES),
            "versions": package_versions(),
            "tasks": _tasks_digest(self.tasks),
        }

    @property
    def program(self) -> str:
        """The module that compiles it, run in a process of its own."""
        return "vla_gym.suites.libero.compile_scene"

    def arguments(self) -> dict[str, Any]:
        """Return what the program needs to know, JSON-ready."""
        return {
            "tasks": [dataclasses.asdict(task) for task in self.tasks],
            "pack": self.pack,
            "assets": str(self.asset_root.resolve()),
        }


@dataclass(frozen=True)
class ClutterRequest(LiberoSceneRequest):
    """A scene with clutter, see :mod:`vla_gym.suites.libero.compile_clutter`.

    Attributes:
        plain: Folder of the compiled scene without clutter.
        categories: What to add, one of each.
    """

    plain: Path
    categories: tuple[str, ...]

    def inputs(self) -> dict[str, Any]:
        """Return what the compiled scene depends on besides the asset pack and the machine."""
        clutter = {"compiler": _digest(_CLUTTER_SOURCES), "categories": list(self.categories)}
        return super().inputs() | {"clutter": clutter}

    @property
    def program(self) -> str:
        """The module that compiles it, run in a process of its own."""
        return "vla_gym.suites.libero.compile_clutter"

    def arguments(self) -> dict[str, Any]:
        """Return what the program needs to know, JSON-ready."""
        more = {"plain": str(self.plain.resolve()), "clutter": list(self.categories)}
        return super().arguments() | more


@cache
def package_versions() -> dict[str, str]:
    """Return the installed versions that a compiled scene depends on, without importing them.

    Raises:
        CompileError: If one of the packages is not installed.
    """
    versions = {"mujoco": _version("mujoco"), "robosuite": _version("robosuite")}
    return versions | {"libero": _version(*_LIBERO_DISTRIBUTIONS)}


@cache
def _digest(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in sources:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


@cache
def _tasks_digest(tasks: tuple[LiberoTask, ...]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{task.suite}/{task.task_id}/{task.name}\n".encode())
        digest.update(task.bddl_file.read_bytes())
        digest.update(task.init_states_file.read_bytes())
    return digest.hexdigest()


def _version(*distributions: str) -> str:
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    raise CompileError(
        f"None of the packages {', '.join(distributions)} is installed. "
        "Install the project's dependencies: pip install vla-gym"
    )
