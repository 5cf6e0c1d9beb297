"""Builds LIBERO's own environment on any asset pack; only for the compile process and for tests.

Importing libero has side effects (it wants a configuration file, reads the working directory and
prints), so :func:`prepare` must run first, in a process made for the purpose.
"""

from __future__ import annotations

import importlib
import os
import pdb
import sys
import types
from pathlib import Path
from typing import Any

import yaml

from vla_gym.errors import AssetError, CompileError
from vla_gym.suites.libero.tasks import LiberoTask, libero_data_root

# Textures that upstream's arenas ask for by style. Where a pack lacks one, the texture that the
# scene file itself names stands in: only the look of floor and walls changes.
_STAND_INS = {
    "light-gray-floor-tile.png": "tile_grigia_caldera_porcelain_floor.png",
    "light-gray-plaster.png": "smooth_light_gray_plaster.png",
    "gray_ceramic_tile.png": "tile_grigia_caldera_porcelain_floor.png",
    "yellow_linen_wall_texture.png": "smooth_light_gray_plaster.png",
}


def prepare(asset_root: Path, workdir: Path) -> None:
    """Import libero so that it reads its assets from ``asset_root``.

    Args:
        asset_root: Folder with LIBERO's layout (scenes/, articulated_objects/, ...).
        workdir: Empty folder for a configuration file and links; must live as long as the
            process.

    Raises:
        AssetError: If the folder does not have LIBERO's layout.
    """
    _overlay(asset_root, workdir / "assets")
    write_config(workdir, libero_data_root(), workdir / "assets")
    # One of upstream's samplers starts a debugger where it finds no place: it would wait for ever.
    vars(pdb)["set_trace"] = _no_place_found
    os.environ["LIBERO_CONFIG_PATH"] = str(workdir)
    # robosuite logs into /tmp/robosuite.log, which belongs to the first user of the machine.
    private = types.ModuleType("robosuite.macros_private")
    vars(private)["FILE_LOGGING_LEVEL"] = None
    sys.modules.setdefault(private.__name__, private)
    importlib.import_module("libero.libero.envs")
    # Upstream's reader evaluates the numbers of a yaw_rotation as Python.
    vars(importlib.import_module("libero.libero.envs.bddl_utils"))["eval"] = float


def task_file(task: LiberoTask, workdir: Path) -> Path:
    """Return the BDDL file of a task; a user's own is written into ``workdir``."""
    if not task.own_bddl:
        return task.bddl_file
    path = workdir / f"{task.entry}.bddl"
    path.write_text(task.own_bddl, encoding="utf-8")
    return path


def make_env(bddl_file: Path, **overrides: Any) -> Any:
    """Return upstream's ``ControlEnv`` for one task, without cameras unless asked.

    Args:
        bddl_file: The task.
        **overrides: Further arguments of ``ControlEnv``.
    """
    wrapper: Any = importlib.import_module("libero.libero.envs.env_wrapper")
    options: dict[str, Any] = {
        "use_camera_obs": False,
        "has_offscreen_renderer": False,
        "has_renderer": False,
    }
    return wrapper.ControlEnv(bddl_file_name=str(bddl_file), **{**options, **overrides})


def reset_env(env: Any, attempts: int = 100) -> None:
    """Reset upstream's inner environment (``ControlEnv.env``), drawing again if a draw fails.

    ``ControlEnv.reset`` is not used: it swallows every exception and tries for ever.

    Raises:
        CompileError: If no valid placement was drawn in ``attempts`` resets.
    """
    errors: Any = importlib.import_module("robosuite.utils.errors")
    for _ in range(attempts):
        try:
            env.reset()
            return
        except errors.RandomizationError:
            continue
    raise CompileError(f"Upstream's reset found no valid placement in {attempts} attempts.")


def _no_place_found() -> None:
    errors: Any = importlib.import_module("robosuite.utils.errors")
    raise errors.RandomizationError("Cannot place all objects ):")


def _overlay(asset_root: Path, target: Path) -> None:
    """Link a pack's files into ``target``, with stand-ins for absent textures."""
    if not (asset_root / "scenes").is_dir():
        raise AssetError(
            f"{asset_root} is not a LIBERO asset folder: expected a folder 'scenes' in it."
        )
    textures = target / "textures"
    textures.mkdir(parents=True)
    for entry in asset_root.iterdir():
        if entry.name != "textures":
            (target / entry.name).symlink_to(entry.resolve())
    if (asset_root / "textures").is_dir():
        for entry in (asset_root / "textures").iterdir():
            (textures / entry.name).symlink_to(entry.resolve())
    for wanted, stand_in in _STAND_INS.items():
        source = asset_root / "textures" / stand_in
        if not (textures / wanted).exists() and source.is_file():
            (textures / wanted).symlink_to(source.resolve())


def write_config(folder: Path, root: Path, assets: Path) -> None:
    """Write a config.yaml that tells an installed LIBERO where it is, so that it asks nothing."""
    paths = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": folder / "datasets",
        "assets": assets,
    }
    text = yaml.safe_dump({key: str(path) for key, path in paths.items()}, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
