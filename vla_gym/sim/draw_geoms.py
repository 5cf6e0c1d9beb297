"""Draws one geom with the same OpenGL calls as MuJoCo's ``renderGeom``, in compiled code.

Follows src/render/render_gl3.c of MuJoCo 3.3, for the types in ``scene_memory.KNOWN_TYPES``, with
the same single-precision arithmetic. Two things differ, and change nothing: of a mesh only the
given triangles are drawn, from a buffer instead of a display list; and state that OpenGL has
already is not set again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.sim.gl_calls import (
    BACK,
    EMISSION,
    FRONT,
    FRONT_AND_BACK,
    OBJECT_PLANE,
    SHININESS,
    SPECULAR,
    TEXTURE_2D,
    TEXTURE_COORD_ARRAY,
    TEXTURE_COORD_S,
    TEXTURE_CUBE_MAP,
    TEXTURE_GEN_S,
    TRIANGLES,
    UNSIGNED_INT,
    gl_bind_texture,
    gl_call_list,
    gl_color4f,
    gl_cull_face,
    gl_disable,
    gl_disable_client_state,
    gl_draw_elements,
    gl_enable,
    gl_enable_client_state,
    gl_materialf,
    gl_materialfv,
    gl_mult_matrixf,
    gl_pop_matrix,
    gl_push_matrix,
    gl_scalef,
    gl_tex_genfv,
    gl_translatef,
)
from vla_gym.sim.scene_memory import (
    BOX,
    CAPSULE,
    CYLINDER,
    DATA_ID,
    ELLIPSOID,
    MAT,
    MATERIAL,
    MESH,
    PLANE,
    POS,
    RGBA,
    SIZE,
    SPHERE,
    TEX_COORD,
    TYPE,
)
from vla_gym.sim.scene_memory import EMISSION as GEOM_EMISSION
from vla_gym.sim.scene_memory import SHININESS as GEOM_SHININESS
from vla_gym.sim.scene_memory import SPECULAR as GEOM_SPECULAR

# Display lists of MuJoCo's context, relative to its first one.
_SPHERE, _SPHERE_TOP, _SPHERE_BOTTOM, _CYLINDER, _CYLINDER_OPEN, _, _BOX, _ = range(8)
CYLINDER_LIST = _CYLINDER
_TEXTURE_KIND_2D = 0  # mjTEXTURE_2D
_MIN_VALUE = 1e-15  # mjMINVAL
_ZERO, _ONE, _TWO, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
_FULL_SHININESS = np.float32(128)


class Resources(NamedTuple):
    """What the OpenGL context holds, from MuJoCo's ``MjrContext``.

    Attributes:
        gl: Address of the table of OpenGL functions.
        builtin_lists: First display list of the built-in shapes.
        plane_lists: First display list of the planes.
        material_texture: int32: texture of each material or -1.
        texture_names: int32: OpenGL's name of each texture.
        texture_kinds: int32: mjtTexture of each.
        repeats: float32 (2 x materials,): repetitions of 2D textures.
        uniform: int32: whether a material's texture is scaled by size.
        skybox: OpenGL's name of the skybox or -1.
    """

    gl: int
    builtin_lists: int
    plane_lists: int
    material_texture: np.ndarray
    texture_names: np.ndarray
    texture_kinds: np.ndarray
    repeats: np.ndarray
    uniform: np.ndarray
    skybox: int


class Brush(NamedTuple):
    """What was set last, and a place for arguments that OpenGL reads by address.

    Attributes:
        last: float32 (5,): emission (3), shininess, specular.
        numbers: float32 (16,).
    """

    last: np.ndarray
    numbers: np.ndarray


def make_brush() -> Brush:
    """Return a brush that knows of nothing set."""
    return Brush(np.full(5, np.nan, np.float32), np.zeros(16, np.float32))


@compiled
def is_behind(head: np.ndarray, pos: np.ndarray, mat: np.ndarray) -> bool:
    """Tell whether a point is on the lower side of a plane; all float32, as in MuJoCo."""
    side = (head[0] - pos[0]) * mat[2] + (head[1] - pos[1]) * mat[5] + (head[2] - pos[2]) * mat[8]
    return side < _ZERO


@compiled
def _tex_gen(gl: int, axis: int, plane: np.ndarray) -> None:
    gl_tex_genfv(gl, (TEXTURE_COORD_S + axis, OBJECT_PLANE, plane.ctypes.data))


@compiled
def cube_texture(gl: int, name: int, on: bool) -> None:
    """Bind a cube texture with generated coordinates, or unbind it."""
    for k in range(3):
        if on:
            gl_enable(gl, (TEXTURE_GEN_S + k,))
        else:
            gl_disable(gl, (TEXTURE_GEN_S + k,))
    if on:
        gl_enable(gl, (TEXTURE_CUBE_MAP,))
        gl_bind_texture(gl, (TEXTURE_CUBE_MAP, name))
    else:
        gl_disable(gl, (TEXTURE_CUBE_MAP,))


@compiled
def _texture(
    number: np.ndarray, geom: np.ndarray, on: bool, held: Resources, four: np.ndarray
) -> None:
    """Switch a geom's texture on or off (settexture)."""
    gl, material = held.gl, number[MATERIAL]
    texture = held.material_texture[material]
    if texture < 0:
        return
    name = held.texture_names[texture]
    if not number[TEX_COORD] and held.texture_kinds[texture] != _TEXTURE_KIND_2D:
        cube_texture(gl, name, on)
        if on:
            for k in range(3):
                four[:4] = _ZERO
                four[k] = geom[SIZE + k] if held.uniform[material] else _ONE
                _tex_gen(gl, k, four)
        return
    if not on:
        gl_disable(gl, (TEXTURE_2D,))
    else:
        gl_enable(gl, (TEXTURE_2D,))
        gl_bind_texture(gl, (TEXTURE_2D, name))
    if number[TEX_COORD]:
        return
    for k in range(2):
        if not on:
            gl_disable(gl, (TEXTURE_GEN_S + k,))
            continue
        gl_enable(gl, (TEXTURE_GEN_S + k,))
        scale, size = held.repeats[2 * material + k], geom[SIZE + k]
        if number[DATA_ID] >= 0 and size > 0:
            scale = np.float32(np.float64(scale) / max(_MIN_VALUE, float(size)))
        if held.uniform[material] and size > 0:
            scale = scale * size
        four[:4] = _ZERO
        four[k], four[3] = (_HALF if k == 0 else -_HALF) * scale, -_HALF
        _tex_gen(gl, k, four)


@compiled
def _colour(
    number: np.ndarray, geom: np.ndarray, strength: np.float32, back: bool, gl: int, brush: Brush
) -> None:
    """Set colour and material; ``strength`` multiplies red, green and blue."""
    red, green, blue = geom[RGBA] * strength, geom[RGBA + 1] * strength, geom[RGBA + 2] * strength
    alpha = geom[RGBA + 3]
    if number[TYPE] == PLANE and back:  # planes are more transparent from the back
        alpha = np.float32(np.float64(alpha) * 0.3)
    last, four = brush.last, brush.numbers
    glow = geom[GEOM_EMISSION]
    if not (last[0] == glow * red and last[1] == glow * green and last[2] == glow * blue):
        last[0], last[1], last[2] = glow * red, glow * green, glow * blue
        four[0], four[1], four[2], four[3] = last[0], last[1], last[2], _ONE
        gl_materialfv(gl, (FRONT_AND_BACK, EMISSION, four.ctypes.data))
    gl_color4f(gl, (red, green, blue, alpha))
    if not last[3] == geom[GEOM_SHININESS]:
        last[3] = geom[GEOM_SHININESS]
        gl_materialf(gl, (FRONT_AND_BACK, SHININESS, last[3] * _FULL_SHININESS))
    if not last[4] == geom[GEOM_SPECULAR]:
        last[4] = geom[GEOM_SPECULAR]
        four[0], four[1], four[2], four[3] = last[4], last[4], last[4], _ONE
        gl_materialfv(gl, (FRONT_AND_BACK, SPECULAR, four.ctypes.data))


@compiled
def _capsule(gl: int, lists: int, size: np.ndarray) -> None:
    radius = np.float32(0.5 * np.float64(size[0] + size[1]))
    gl_scalef(gl, (size[0], size[1], size[2]))
    gl_call_list(gl, (lists + _CYLINDER_OPEN,))
    gl_scalef(gl, (_ONE, _ONE, radius / size[2]))
    gl_translatef(gl, (_ZERO, _ZERO, (size[2] - radius) / radius))
    gl_call_list(gl, (lists + _SPHERE_TOP,))
    gl_translatef(gl, (_ZERO, _ZERO, _TWO * (radius - size[2]) / radius))
    gl_call_list(gl, (lists + _SPHERE_BOTTOM,))


@compiled
def _plane(gl: int, lists: int, number: np.ndarray, size: np.ndarray, back: bool) -> None:
    if back:
        gl_cull_face(gl, (FRONT,))
    if number[DATA_ID] >= 0:
        gl_call_list(gl, (lists + number[DATA_ID] + 1,))
    else:
        gl_scalef(gl, (size[0], size[1], _ONE))
        gl_call_list(gl, (lists,))
    if back:
        gl_cull_face(gl, (BACK,))


@compiled
def _shape(
    number: np.ndarray,
    size: np.ndarray,
    back: bool,
    held: Resources,
    indices: Any,
    runs: np.ndarray,
) -> None:
    gl, kind, material = held.gl, number[TYPE], number[MATERIAL]
    if kind == MESH:
        textured = number[TEX_COORD] and material >= 0 and held.material_texture[material] >= 0
        if textured:
            gl_enable_client_state(gl, (TEXTURE_COORD_ARRAY,))
        for run in range(len(runs)):
            start = indices + 4 * runs[run, 0]
            gl_draw_elements(gl, (TRIANGLES, runs[run, 1], UNSIGNED_INT, start))
        if textured:
            gl_disable_client_state(gl, (TEXTURE_COORD_ARRAY,))
    elif kind == PLANE:
        _plane(gl, held.plane_lists, number, size, back)
    elif kind == CAPSULE:
        _capsule(gl, held.builtin_lists, size)
    else:
        gl_scalef(gl, (size[0], size[1], size[2]))
        if kind == BOX:
            gl_call_list(gl, (held.builtin_lists + _BOX,))
        elif kind == CYLINDER:
            gl_call_list(gl, (held.builtin_lists + _CYLINDER,))
        elif kind == SPHERE or kind == ELLIPSOID:
            gl_call_list(gl, (held.builtin_lists + _SPHERE,))


@compiled
def draw_geom(
    number: np.ndarray,
    geom: np.ndarray,
    strength: np.float32,
    head: np.ndarray,
    held: Resources,
    brush: Brush,
    indices: Any,
    runs: np.ndarray,
) -> None:
    """Draw a geom.

    Args:
        number: int32 (59,) the geom.
        geom: float32 (59,) the same memory.
        strength: Multiplies its colour (reflections).
        head: float32 (3,) the camera's position.
        held: OpenGL's resources.
        brush: What was set last.
        indices: Address of the vertex numbers of meshes.
        runs: int64 (R, 2): those to draw, for a mesh: first and how many.
    """
    gl, matrix = held.gl, brush.numbers
    size, pos, mat = geom[SIZE : SIZE + 3], geom[POS : POS + 3], geom[MAT : MAT + 9]
    back = is_behind(head, pos, mat)
    material = number[MATERIAL]
    if material >= 0:
        _texture(number, geom, True, held, matrix)
    _colour(number, geom, strength, back, gl, brush)
    gl_push_matrix(gl, ())
    gl_translatef(gl, (pos[0], pos[1], pos[2]))
    for column in range(3):
        for row in range(3):
            matrix[4 * column + row] = mat[3 * row + column]
        matrix[4 * column + 3] = _ZERO
        matrix[12 + column] = _ZERO
    matrix[15] = _ONE
    gl_mult_matrixf(gl, (matrix.ctypes.data,))
    _shape(number, size, back, held, indices, runs)
    gl_pop_matrix(gl, ())
    if material >= 0:
        _texture(number, geom, False, held, matrix)
