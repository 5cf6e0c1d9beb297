"""MuJoCo's abstract scene as arrays: the same memory, readable by compiled code.

``MjvScene`` hands out one Python object a geom, whose fields take a microsecond each to read. Its
geoms lie behind each other in memory, so one array over all of them is enough. Its layout is
checked against what the objects say before it is trusted.
"""

from __future__ import annotations

import ctypes
from typing import Any

import mujoco
import numpy as np

from vla_gym.sim.compiled import compiled

# Columns of a geom (mjvGeom), in units of four bytes, and MuJoCo's names of the first ones.
TYPE, DATA_ID, OBJECT_TYPE, _, _, MATERIAL, TEX_COORD, _ = range(8)
_INTEGERS = ("type", "dataid", "objtype", "objid", "category", "matid", "texcoord", "segid")
SIZE, POS, MAT, RGBA = 8, 11, 14, 23
ALPHA = RGBA + 3
EMISSION, SPECULAR, SHININESS, REFLECTANCE = 27, 28, 29, 30
BOUND_RADIUS = 57
COLUMNS = 59

# Types of geoms (mjtGeom) that the fast drawing code knows.
PLANE, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = 0, 2, 3, 4, 5, 6, 7
KNOWN_TYPES = (PLANE, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH)
MODEL_GEOM = int(mujoco.mjtObj.mjOBJ_GEOM)

_FLOATS = {
    "emission": EMISSION,
    "specular": SPECULAR,
    "shininess": SHININESS,
    "reflectance": REFLECTANCE,
    "modelrbound": BOUND_RADIUS,
}
_ARRAYS = {"size": SIZE, "pos": POS, "mat": MAT, "rgba": RGBA}


@compiled
def placement(geom: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of a geom's position (3,), rotation (9,) and size (3,)."""
    return geom[POS : POS + 3], geom[MAT : MAT + 9], geom[SIZE : SIZE + 3]


def geom_memory(scene: mujoco.MjvScene) -> np.ndarray | None:
    """Return int32 (maxgeom, 59), a view of the scene's geoms; None if their layout is another.

    The view is valid as long as the scene lives.
    """
    geoms = scene.geoms
    first, second = geoms[0].pos.ctypes.data, geoms[1].pos.ctypes.data
    if second - first != 4 * COLUMNS:
        return None
    words = (ctypes.c_int32 * (COLUMNS * len(geoms))).from_address(first - 4 * POS)
    memory = np.ctypeslib.as_array(words).reshape(len(geoms), COLUMNS)
    return memory if _agrees(geoms[0], memory[0]) else None


def _agrees(geom: Any, row: np.ndarray) -> bool:
    """Tell whether a geom's fields are where they are expected; writes into the geom."""
    for name, column in _ARRAYS.items():
        if getattr(geom, name).ctypes.data != row[column:].ctypes.data:
            return False
    for column, name in enumerate(_INTEGERS):
        setattr(geom, name, 1000 + column)
        if row[column] != 1000 + column:
            return False
    values = row.view(np.float32)
    for number, (name, column) in enumerate(_FLOATS.items()):
        setattr(geom, name, 0.5 + number)
        if values[column] != np.float32(0.5 + number):
            return False
    return True


def light_rows(scene: mujoco.MjvScene) -> np.ndarray:
    """Return float32 (nlight, 7): 1 if directional, position, direction."""
    lights = scene.lights
    rows = np.empty((scene.nlight, 7), np.float32)
    for number in range(scene.nlight):
        light = lights[number]
        rows[number, 0] = light.type == mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
        rows[number, 1:4] = light.pos
        rows[number, 4:7] = light.dir
    return rows
