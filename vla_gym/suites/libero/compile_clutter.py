"""Adds clutter to a scene that is being compiled.

Clutter bodies have no joints and come last, so that all states, addresses, names and tables of the
scene without them hold for the one with them, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_gym.assets.lite.robot import simplify_robot
from vla_gym.errors import CompileError

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


def add_clutter(
    env: Any, plain: Any, pack: str, categories: Sequence[str]
) -> tuple[Any, dict[str, str]]:
    """Compile a scene once more with clutter in it.

    Args:
        env: Upstream's environment of the scene; clutter is put into its MJCF.
        plain: The scene's compiled model.
        pack: ``"libero"`` or ``"lite"``; the latter also gets the low-poly robot.
        categories: What to add, one of each.

    Returns:
        The model, and the body of each category.

    Raises:
        CompileError: If the scene would not be the plain one with something added.
    """
    import mujoco  # noqa: PLC0415 - the compile process imports it after libero

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
    _take_over(model, plain)
    return model, bodies


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
