"""Draws one geom with the same OpenGL calls as MuJoCo's ``renderGeom``, in compiled code.

Follows src/render/render_gl3.c of MuJoCo 3.3, for the types in ``scene_memory.KNOWN_TYPES``, with
the same single-precision arithmetic. Two things differ, and change nothing: of a mesh only the
given triangles are drawn, from a buffer instead of a display list; and state that OpenGL has
already is not set again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.sim.rendering.software import gl_calls as gl
from vla_gym.sim.rendering.software import scene_memory as mjv
from vla_gym.sim.rendering.software.structs import Resources, Scene

# Display lists of MuJoCo's context, relative to its first one.
_SPHERE, _SPHERE_TOP, _SPHERE_BOTTOM, _CYLINDER, _CYLINDER_OPEN, _, _BOX, _ = range(8)
CYLINDER_LIST = _CYLINDER
_TEXTURE_KIND_2D = 0  # mjTEXTURE_2D
_MIN_VALUE = 1e-15  # mjMINVAL
_ZERO, _ONE, _TWO, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
_FULL_SHININESS = np.float32(128)


@compiled
def is_behind(head: np.ndarray, pos: np.ndarray, mat: np.ndarray) -> bool:
    """Tell whether a point is on the lower side of a plane; all float32, as in MuJoCo."""
    side = (head[0] - pos[0]) * mat[2] + (head[1] - pos[1]) * mat[5] + (head[2] - pos[2]) * mat[8]
    return side < _ZERO


@compiled
def _tex_gen(table: int, axis: int, plane: np.ndarray) -> None:
    gl.tex_genfv(table, (gl.TEXTURE_COORD_S + axis, gl.OBJECT_PLANE, plane.ctypes.data))


@compiled
def cube_texture(table: int, name: int, on: bool) -> None:
    """Bind a cube texture with generated coordinates, or unbind it."""
    for k in range(3):
        if on:
            gl.enable(table, (gl.TEXTURE_GEN_S + k,))
        else:
            gl.disable(table, (gl.TEXTURE_GEN_S + k,))
    if on:
        gl.enable(table, (gl.TEXTURE_CUBE_MAP,))
        gl.bind_texture(table, (gl.TEXTURE_CUBE_MAP, name))
    else:
        gl.disable(table, (gl.TEXTURE_CUBE_MAP,))


@compiled
def _texture(
    number: np.ndarray, geom: np.ndarray, on: bool, resources: Resources, four: np.ndarray
) -> None:
    """Switch a geom's texture on or off (settexture)."""
    table, material = resources.table, number[mjv.MATERIAL]
    texture = resources.material_texture[material]
    if texture < 0:
        return
    name = resources.texture_names[texture]
    if not number[mjv.TEX_COORD] and resources.texture_kinds[texture] != _TEXTURE_KIND_2D:
        cube_texture(table, name, on)
        if on:
            for k in range(3):
                four[:4] = _ZERO
                four[k] = geom[mjv.SIZE + k] if resources.uniform[material] else _ONE
                _tex_gen(table, k, four)
        return
    if not on:
        gl.disable(table, (gl.TEXTURE_2D,))
    else:
        gl.enable(table, (gl.TEXTURE_2D,))
        gl.bind_texture(table, (gl.TEXTURE_2D, name))
    if number[mjv.TEX_COORD]:
        return
    for k in range(2):
        if not on:
            gl.disable(table, (gl.TEXTURE_GEN_S + k,))
            continue
        gl.enable(table, (gl.TEXTURE_GEN_S + k,))
        scale, size = resources.repeats[2 * material + k], geom[mjv.SIZE + k]
        if number[mjv.DATA_ID] >= 0 and size > 0:
            scale = np.float32(np.float64(scale) / max(_MIN_VALUE, float(size)))
        if resources.uniform[material] and size > 0:
            scale = scale * size
        four[:4] = _ZERO
        four[k], four[3] = (_HALF if k == 0 else -_HALF) * scale, -_HALF
        _tex_gen(table, k, four)


@compiled
def _colour(
    number: np.ndarray, geom: np.ndarray, strength: np.float32, back: bool, scene: Scene
) -> None:
    """Set colour and material; ``strength`` multiplies red, green and blue."""
    table, last, four = scene.resources.table, scene.buffers.material, scene.buffers.numbers
    red, green = geom[mjv.RGBA] * strength, geom[mjv.RGBA + 1] * strength
    blue, alpha = geom[mjv.RGBA + 2] * strength, geom[mjv.ALPHA]
    if number[mjv.TYPE] == mjv.PLANE and back:  # planes are more transparent from the back
        alpha = np.float32(np.float64(alpha) * 0.3)
    glow = geom[mjv.EMISSION]
    if not (last[0] == glow * red and last[1] == glow * green and last[2] == glow * blue):
        last[0], last[1], last[2] = glow * red, glow * green, glow * blue
        four[0], four[1], four[2], four[3] = last[0], last[1], last[2], _ONE
        gl.materialfv(table, (gl.FRONT_AND_BACK, gl.EMISSION, four.ctypes.data))
    gl.color4f(table, (red, green, blue, alpha))
    if not last[3] == geom[mjv.SHININESS]:
        last[3] = geom[mjv.SHININESS]
        gl.materialf(table, (gl.FRONT_AND_BACK, gl.SHININESS, last[3] * _FULL_SHININESS))
    if not last[4] == geom[mjv.SPECULAR]:
        last[4] = geom[mjv.SPECULAR]
        four[0], four[1], four[2], four[3] = last[4], last[4], last[4], _ONE
        gl.materialfv(table, (gl.FRONT_AND_BACK, gl.SPECULAR, four.ctypes.data))


@compiled
def _capsule(table: int, lists: int, size: np.ndarray) -> None:
    radius = np.float32(0.5 * np.float64(size[0] + size[1]))
    gl.scalef(table, (size[0], size[1], size[2]))
    gl.call_list(table, (lists + _CYLINDER_OPEN,))
    gl.scalef(table, (_ONE, _ONE, radius / size[2]))
    gl.translatef(table, (_ZERO, _ZERO, (size[2] - radius) / radius))
    gl.call_list(table, (lists + _SPHERE_TOP,))
    gl.translatef(table, (_ZERO, _ZERO, _TWO * (radius - size[2]) / radius))
    gl.call_list(table, (lists + _SPHERE_BOTTOM,))


@compiled
def _plane(table: int, lists: int, number: np.ndarray, size: np.ndarray, back: bool) -> None:
    if back:
        gl.cull_face(table, (gl.FRONT,))
    if number[mjv.DATA_ID] >= 0:
        gl.call_list(table, (lists + number[mjv.DATA_ID] + 1,))
    else:
        gl.scalef(table, (size[0], size[1], _ONE))
        gl.call_list(table, (lists,))
    if back:
        gl.cull_face(table, (gl.BACK,))


@compiled
def _shape(
    number: np.ndarray,
    size: np.ndarray,
    back: bool,
    resources: Resources,
    indices: Any,
    runs: np.ndarray,
) -> None:
    table, kind, material = resources.table, number[mjv.TYPE], number[mjv.MATERIAL]
    if kind == mjv.MESH:
        textured = (
            number[mjv.TEX_COORD] and material >= 0 and resources.material_texture[material] >= 0
        )
        if textured:
            gl.enable_client_state(table, (gl.TEXTURE_COORD_ARRAY,))
        for run in range(len(runs)):
            start = indices + 4 * runs[run, 0]
            gl.draw_elements(table, (gl.TRIANGLES, runs[run, 1], gl.UNSIGNED_INT, start))
        if textured:
            gl.disable_client_state(table, (gl.TEXTURE_COORD_ARRAY,))
    elif kind == mjv.PLANE:
        _plane(table, resources.plane_lists, number, size, back)
    elif kind == mjv.CAPSULE:
        _capsule(table, resources.builtin_lists, size)
    else:
        gl.scalef(table, (size[0], size[1], size[2]))
        if kind == mjv.BOX:
            gl.call_list(table, (resources.builtin_lists + _BOX,))
        elif kind == mjv.CYLINDER:
            gl.call_list(table, (resources.builtin_lists + _CYLINDER,))
        elif kind == mjv.SPHERE or kind == mjv.ELLIPSOID:
            gl.call_list(table, (resources.builtin_lists + _SPHERE,))


@compiled
def draw_geom(
    number: np.ndarray, geom: np.ndarray, strength: np.float32, scene: Scene, runs: np.ndarray
) -> None:
    """Draw a geom.

    Args:
        number: int32 (59,) the geom.
        geom: float32 (59,) the same memory.
        strength: Multiplies its colour (reflections).
        scene: What it belongs to.
        runs: int64 (R, 2): for a mesh, first and number of the vertices to draw at once.
    """
    resources, matrix = scene.resources, scene.buffers.numbers
    table = resources.table
    pos, mat, size = mjv.placement(geom)
    back = is_behind(scene.head, pos, mat)
    material = number[mjv.MATERIAL]
    if material >= 0:
        _texture(number, geom, True, resources, matrix)
    _colour(number, geom, strength, back, scene)
    gl.push_matrix(table, ())
    gl.translatef(table, (pos[0], pos[1], pos[2]))
    for column in range(3):
        for row in range(3):
            matrix[4 * column + row] = mat[3 * row + column]
        matrix[4 * column + 3] = _ZERO
        matrix[12 + column] = _ZERO
    matrix[15] = _ONE
    gl.mult_matrixf(table, (matrix.ctypes.data,))
    _shape(number, size, back, resources, np.int64(scene.buffers.indices.ctypes.data), runs)
    gl.pop_matrix(table, ())
    if material >= 0:
        _texture(number, geom, False, resources, matrix)
