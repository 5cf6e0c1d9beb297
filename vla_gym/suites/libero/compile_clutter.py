"""Compiles a scene once more with clutter in it: a program, not a module to import.

Usage: ``python -m vla_gym.suites.libero.compile_clutter REQUEST.json``. The request names a
compiled scene, its tasks, the asset folder, the categories to add and the folder that receives the
new scene. Clutter bodies have no joints and come last, so that all states, addresses, names and
tables of the plain scene hold for this one, too; it is stored with the same files.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.assets.lite.robot import simplify_robot
from vla_gym.errors import CompileError
from vla_gym.suites.libero import upstream_env
from vla_gym.suites.libero.compile_scene import read_request, save_model
from vla_gym.suites.libero.tasks import LiberoTask

# Clutter that no episode shows is kept here, in metres: below the floor, out of all reach.
PARKED_Z = -20.0

# What is addressed by number, and the field with its count.
_NAMED = {
    "body": "nbody",
    "geom": "ngeom",
    "site": "nsite",
    "joint": "njnt",
    "actuator": "nu",
    "camera": "ncam",
    "light": "nlight",
}


def main() -> int:
    """Compile the scene of a request file; return the exit status."""
    request = read_request()
    plain, out = Path(request["plain"]), Path(request["out"])
    with tempfile.TemporaryDirectory(dir=out, prefix="work-") as workdir:
        bodies = compile_clutter(
            plain,
            LiberoTask(**request["tasks"][0]),
            request["pack"],
            Path(request["assets"]),
            request["clutter"],
            Path(workdir),
        )
        (Path(workdir) / "scene.mjb").rename(out / "scene.mjb")
    scene = json.loads((plain / "scene.json").read_text(encoding="utf-8"))
    scene["clutter"] = bodies
    (out / "scene.json").write_text(json.dumps(scene, indent=1), encoding="utf-8")
    shutil.copyfile(plain / "init_states.npz", out / "init_states.npz")
    return 0


def compile_clutter(
    plain: Path,
    task: LiberoTask,
    pack: str,
    asset_root: Path,
    categories: Sequence[str],
    workdir: Path,
) -> dict[str, str]:
    """Write scene.mjb with clutter into ``workdir``.

    Args:
        plain: Folder of the compiled scene without.
        task: A task of the scene.
        pack: ``"libero"`` or ``"lite"``; the latter also gets the low-poly robot.
        asset_root: Folder with LIBERO's layout.
        categories: What to add, one of each.
        workdir: Empty folder.

    Returns:
        The body of each category.

    Raises:
        CompileError: If the scene would not be the plain one with something added.
    """
    upstream_env.prepare(asset_root, workdir / "libero")
    import mujoco  # noqa: PLC0415 - after prepare(): libero picks the GL backend first

    env = upstream_env.make_env(upstream_env.task_file(task, workdir)).env
    upstream_env.reset_env(env)
    objects: Any = importlib.import_module("libero.libero.envs.objects")
    bodies = {}
    for number, category in enumerate(categories):
        thing = objects.get_object_fn(category)(name=f"clutter_{category}")
        env.model.merge_assets(thing)
        body = thing.get_obj()
        for joint in [e for e in body if e.tag in ("joint", "freejoint")]:
            body.remove(joint)
        body.set("pos", f"{number} 0 {PARKED_Z}")
        env.model.worldbody.append(body)
        bodies[category] = thing.root_body
    xml = env.model.get_xml()
    if pack != "libero":
        xml = simplify_robot(xml)
    model = mujoco.MjModel.from_xml_string(xml)
    original = mujoco.MjModel.from_binary_path(str(plain / "scene.mjb"))
    _take_over(model, original)
    save_model(model, workdir / "scene.mjb")
    return bodies


def _take_over(model: Any, plain: Any) -> None:
    """Make a model equal the plain one, but for what comes after it.

    Upstream hides sites and moves fixtures after it has compiled its model. MuJoCo measures the
    size of the whole scene, parked bodies included, and puts the camera's near plane accordingly.
    """
    if (model.nq, model.nv, model.nu, model.na) != (plain.nq, plain.nv, plain.nu, plain.na):
        raise CompileError("Clutter changed the size of the state.")
    for kind, number in _NAMED.items():
        for index in range(getattr(plain, number)):
            ours, theirs = getattr(model, kind)(index).name, getattr(plain, kind)(index).name
            if ours != theirs:
                raise CompileError(
                    f"With clutter {kind} {index} of the scene is {ours!r}, without {theirs!r}."
                )
    for field in ("site_rgba", "body_pos", "body_quat"):
        ours, theirs = getattr(model, field), getattr(plain, field)
        ours[: len(theirs)] = theirs
    model.site_rgba[plain.nsite :, 3] = 0.0
    for field in ("extent", "meaninertia", "meanmass", "meansize"):
        setattr(model.stat, field, getattr(plain.stat, field))
    model.stat.center[:] = plain.stat.center
    for field in (
        "geom_pos",
        "geom_size",
        "geom_rgba",
        "geom_friction",
        "body_mass",
        "dof_damping",
    ):
        ours, theirs = getattr(model, field), getattr(plain, field)
        if not np.array_equal(ours[: len(theirs)], theirs):
            raise CompileError(f"The scene with clutter differs from the plain one in {field}.")


if __name__ == "__main__":
    sys.exit(main())
