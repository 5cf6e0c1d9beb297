"""What LIBERO's compile process is asked for, and everything that its result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from vla_gym.assets.pack import AssetPack
from vla_gym.errors import CompileError
from vla_gym.suites.disk_cache import SceneRequest
from vla_gym.suites.libero.tasks import LIBERO, LiberoTask

_COMPILER_SOURCES = ("compile_scene.py", "extract.py", "initial_state.py", "upstream_env.py")
_CLUTTER_SOURCES = ("compile_clutter.py",)  # besides these


def scene_request(
    scene: str, pack: AssetPack, tasks: tuple[LiberoTask, ...], clutter: Sequence[str] = ()
) -> SceneRequest:
    """Return the request for a scene; see :mod:`vla_gym.suites.libero.compile_scene`.

    Args:
        scene: Its name.
        pack: The asset pack.
        tasks: All tasks of the scene.
        clutter: Categories of clutter to add, one of each.
    """
    inputs = {
        "compiler": _digest(_COMPILER_SOURCES + (_CLUTTER_SOURCES if clutter else ())),
        "versions": package_versions(),
        "tasks": _tasks_digest(tasks),
        "clutter": list(clutter),
    }
    arguments = {
        "tasks": [dataclasses.asdict(task) for task in tasks],
        "pack": pack.name,
        "assets": str(pack.root.resolve()),
        "clutter": list(clutter),
    }
    program = "vla_gym.suites.libero.compile_scene"
    return SceneRequest(scene, pack, program, inputs, arguments)


@cache
def package_versions() -> dict[str, str]:
    """Return the installed versions that a compiled scene depends on, without importing them.

    Raises:
        CompileError: If one of the packages is not installed.
    """
    names = {"mujoco": "mujoco", "robosuite": "robosuite", "libero": LIBERO}
    try:
        return {key: f"{name} {metadata.version(name)}" for key, name in names.items()}
    except metadata.PackageNotFoundError as error:
        raise CompileError(f"{error}: pip install vla-gym") from error


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
        digest.update(f"{task.entry}/{task.name}\n{task.bddl}".encode())
    return digest.hexdigest()
