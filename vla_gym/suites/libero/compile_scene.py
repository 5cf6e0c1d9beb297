"""Compiles one scene through LIBERO's own problem classes: a program, not a module to import.

Usage: ``python -m vla_gym.suites.libero.compile_scene REQUEST.json``. The request names the tasks
(fields of ``LiberoTask``), the asset folder, the clutter to add and the folder that receives
scene.mjb and scene.json. It ends early when its standard input ends. It is a process of its own
because libero and robosuite print, ask questions, set global state and pull in heavy packages.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.assets.lite.robot import simplify_robot
from vla_gym.errors import CompileError
from vla_gym.outside import to_type
from vla_gym.suites.disk_cache import EXPLAINED, FILES
from vla_gym.suites.libero import extract, initial_state, upstream_env
from vla_gym.suites.libero.compile_clutter import add_clutter
from vla_gym.suites.libero.goals import compile_goal
from vla_gym.suites.libero.scene_file import SceneFile
from vla_gym.suites.libero.tasks import LiberoTask


def main() -> int:
    """Compile the scene of a request file; return the exit status."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    pack, clutter = request["pack"], request["clutter"]
    tasks = [LiberoTask(**fields) for fields in request["tasks"]]
    with tempfile.TemporaryDirectory(dir=request["out"], prefix="work-") as workdir:
        try:
            compile_scene(tasks, pack, Path(request["assets"]), clutter, Path(workdir))
        except CompileError as error:
            sys.stderr.write("\n" + " ".join(str(error).split()) + "\n")
            return EXPLAINED
        for name in FILES:
            (Path(workdir) / name).rename(Path(request["out"]) / name)
    return 0


def _exit_with_parent() -> None:
    """End this process when its input ends: whoever asked for the scene is gone."""
    # os.read, not sys.stdin: a buffered reader held by a daemon thread aborts a normal exit.
    while os.read(0, 4096):
        pass
    os._exit(1)


def compile_scene(
    tasks: Sequence[LiberoTask], pack: str, asset_root: Path, clutter: Sequence[str], workdir: Path
) -> None:
    """Write scene.mjb and scene.json of one scene into ``workdir``.

    Args:
        tasks: All tasks of the scene, see ``scene_of``.
        pack: ``"libero"`` or ``"lite"``; the latter also gets the low-poly robot.
        asset_root: Folder with LIBERO's layout.
        clutter: Categories of clutter that it gets, one of each; see ``compile_clutter``.
        workdir: Empty folder.

    Raises:
        CompileError: If something in the scene is not supported.
    """
    upstream_env.prepare(asset_root, workdir / "libero")

    files = [upstream_env.task_file(task, workdir) for task in tasks]
    bddl_utils: Any = importlib.import_module("libero.libero.envs.bddl_utils")
    problems = [bddl_utils.robosuite_parse_problem(str(file)) for file in files]
    env = _upstream(tasks[0], files[0], problems[0])
    model = env.sim.model._model if pack == "libero" else _low_poly_model(env)

    objects = extract.object_tables(env, model)
    starts = [
        {"goal": problem["goal_state"], **initial_state.tables(env, model, problem)}
        for problem in problems
    ]
    scene: dict[str, Any] = {
        "nq": int(model.nq),
        "nv": int(model.nv),
        "robot": extract.robot_table(env, model),
        "objects": objects,
        "sites": extract.site_tables(env, model),
        "indicators": extract.indicator_tables(env, model, objects),
        "reset_qpos": extract.reset_qpos(env, model).tolist(),
        "tasks": {task.entry: start for task, start in zip(tasks, starts, strict=True)},
    }
    found = to_type(scene, SceneFile, "The compiled scene", CompileError)
    for task in tasks:
        try:
            compile_goal(found.tasks[task.entry].goal, found.objects, found.sites)
        except CompileError as error:
            raise CompileError(f"{task.name}.bddl: {error}") from error
    for placement in found.tasks[tasks[0].entry].placements:
        if placement.is_fixture:
            # One draw of the fixtures is in the model now; put all of them to the middle of their
            # regions, so that the file does not depend on chance.
            body = found.objects[placement.name].body_id
            model.body_pos[body], model.body_quat[body] = placement.nominal_pose()
    if clutter:
        model, scene["clutter"] = add_clutter(env, model, pack, clutter)
    (workdir / "scene.json").write_text(json.dumps(scene, indent=1), encoding="utf-8")
    save_model(model, workdir / "scene.mjb")


def _upstream(task: LiberoTask, file: Path, problem: Mapping[str, Any]) -> Any:
    """Return upstream's environment of one task, reset: its construction shows helper sites."""
    try:
        env = upstream_env.make_env(file).env
        upstream_env.reset_env(env)
    except Exception as error:
        if not task.own_bddl:
            raise
        what = f"LIBERO cannot build it ({type(error).__name__}: {error})."
        if isinstance(error, KeyError) and error.args[0] in problem["regions"]:
            what = f"nothing in it has the region {error}."
        raise CompileError(f"{task.name}.bddl: {what}") from error
    return env


def save_model(model: Any, path: Path) -> None:
    """Write a compiled model whole.

    MuJoCo's own writing takes no notice of a full disk.

    Raises:
        OSError: If the file cannot be written.
    """
    import mujoco  # noqa: PLC0415

    content = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    path.write_bytes(content.data)


def _low_poly_model(env: Any) -> Any:
    """Compile upstream's scene again with the low-poly robot; sites look as upstream left them."""
    import mujoco  # noqa: PLC0415

    model = mujoco.MjModel.from_xml_string(simplify_robot(env.model.get_xml()))
    original = env.sim.model._model
    for site in range(original.nsite):
        model.site(original.site(site).name).rgba = original.site_rgba[site]
    return model


if __name__ == "__main__":
    sys.exit(main())
