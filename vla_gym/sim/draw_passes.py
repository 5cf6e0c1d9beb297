"""The passes of an image: what is visible, opaque and transparent geoms, the mirror."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vla_gym.sim.compiled import compiled, copy_vector
from vla_gym.sim.culling import box_side, to_local, visible_triangles
from vla_gym.sim.draw_geoms import (
    Brush,
    Resources,
    draw_geom,
    is_behind,
    make_brush,
)
from vla_gym.sim.gl_calls import (
    ALWAYS,
    BLEND,
    CCW,
    CLIP_PLANE0,
    CW,
    DEPTH_TEST,
    EQUAL,
    KEEP,
    LIGHT0,
    ONE_MINUS_SRC_ALPHA,
    POSITION,
    REPLACE,
    SCISSOR_TEST,
    SPOT_DIRECTION,
    SRC_ALPHA,
    STENCIL_BUFFER_BIT,
    STENCIL_TEST,
    gl_blend_func,
    gl_clear,
    gl_clip_plane,
    gl_color_mask,
    gl_depth_mask,
    gl_disable,
    gl_enable,
    gl_front_face,
    gl_lightfv,
    gl_mult_matrixf,
    gl_pop_matrix,
    gl_push_matrix,
    gl_scissor,
    gl_stencil_func,
    gl_stencil_op,
)
from vla_gym.sim.hiding_faces import OPAQUE, Quads
from vla_gym.sim.mesh_chunks import CHUNK_TRIANGLES
from vla_gym.sim.render_views import (
    View,
    mirror_frame,
    mirror_rectangle,
    mirror_view,
)
from vla_gym.sim.scene_memory import (
    ALPHA,
    BOUND_RADIUS,
    BOX,
    CAPSULE,
    CYLINDER,
    DATA_ID,
    MAT,
    MESH,
    MODEL_GEOM,
    OBJECT_TYPE,
    PLANE,
    POS,
    REFLECTANCE,
    SIZE,
    SPHERE,
    TYPE,
)
from vla_gym.sim.triangle_tests import Workspace, make_workspace

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_FAR_AWAY = np.float32(1e10)


class Desk(NamedTuple):
    """Working memory of a renderer; n is the largest number of geoms, T of triangles.

    Attributes:
        brush: See :class:`Brush`.
        work: See :class:`Workspace`.
        indices: uint32 (3 T,) vertex numbers of the pass.
        runs: int64 (R, 2): first of ``indices`` and number of those to draw at once.
        first: int64 (n,): a geom's first run, -1: not drawn.
        end: int64 (n,): the end of its runs.
        order: int64 (n,): transparent geoms, nearest first.
        transparent: bool (n,).
        plane: float64 (4,), read by OpenGL by address: an array of a function's own may be freed
            after its last use in compiled code, before the call.
    """

    brush: Brush
    work: Workspace
    indices: np.ndarray
    runs: np.ndarray
    first: np.ndarray
    end: np.ndarray
    order: np.ndarray
    transparent: np.ndarray
    plane: np.ndarray


def make_desk(geoms: int, triangles: int) -> Desk:
    """Return working memory for scenes of at most that many geoms and triangles in all of them."""
    runs = geoms + triangles // CHUNK_TRIANGLES + 1
    return Desk(
        make_brush(),
        make_workspace(),
        np.zeros(3 * max(triangles, 1), np.uint32),
        np.zeros((runs, 2), np.int64),
        np.zeros(geoms, np.int64),
        np.zeros(geoms, np.int64),
        np.zeros(geoms, np.int64),
        np.zeros(geoms, np.bool_),
        np.zeros(4),
    )


@compiled
def _bound(number: np.ndarray, geom: np.ndarray) -> np.float32:
    """Return a geom's radius as mjv_rbound does."""
    if number[OBJECT_TYPE] == MODEL_GEOM:
        return geom[BOUND_RADIUS]
    kind, a, b, c = number[TYPE], geom[SIZE], geom[SIZE + 1], geom[SIZE + 2]
    if kind == SPHERE:
        return a
    if kind == CAPSULE:
        return a + c
    if kind == CYLINDER:
        return np.sqrt(a * a + c * c)
    if kind == BOX:
        return np.sqrt(a * a + b * b + c * c)
    return max(a, max(b, c))


@compiled
def sort_transparent(numbers: np.ndarray, values: np.ndarray, head: np.ndarray, desk: Desk) -> int:
    """Fill which geoms are transparent and their order, nearest first; return how many are."""
    found = 0
    distances = np.zeros(len(numbers), np.float32)
    for i in range(len(numbers)):
        geom = values[i]
        plane = numbers[i, TYPE] == PLANE
        desk.transparent[i] = geom[ALPHA] < OPAQUE or (
            plane and is_behind(head, geom[POS : POS + 3], geom[MAT : MAT + 9])
        )
        if not desk.transparent[i]:
            continue
        a, b, c = geom[POS] - head[0], geom[POS + 1] - head[1], geom[POS + 2] - head[2]
        distance = np.sqrt(a * a + b * b + c * c) - _bound(numbers[i], geom)
        distances[i] = _FAR_AWAY if plane else distance
        at = found
        while at > 0 and distances[desk.order[at - 1]] > distances[i]:
            desk.order[at] = desk.order[at - 1]
            at -= 1
        desk.order[at] = i
        found += 1
    return found


@compiled
def _own_box(number: np.ndarray, geom: np.ndarray, mesh_boxes: np.ndarray, box: np.ndarray) -> None:
    """Fill centre and half sizes, (6,), of a geom in its own frame."""
    kind = number[TYPE]
    if kind == MESH:
        copy_vector(mesh_boxes[number[DATA_ID] // 2], box)
        return
    box[:3] = 0.0
    for k in range(3):
        box[3 + k] = geom[SIZE + k]
    if kind == PLANE:
        box[5] = 0.0
    elif kind == CAPSULE:
        box[5] += max(geom[SIZE], geom[SIZE + 1])


@compiled
def find_visible(
    numbers: np.ndarray,
    values: np.ndarray,
    skip: int,
    view: View,
    quads: Quads,
    chunks: tuple[np.ndarray, ...],
    desk: Desk,
) -> None:
    """Fill which geoms, and which of their triangles, are to be drawn."""
    local, box = np.empty((len(view.planes), 4)), np.empty(6)
    at, run = int(np.int64(0)), int(np.int64(0))  # constants would be compiled for apart
    for i in range(len(numbers)):
        geom = values[i]
        pos, mat = geom[POS : POS + 3], geom[MAT : MAT + 9]
        desk.first[i], desk.end[i] = -1, run
        # Blending with alpha 0 leaves what is there; OpenGL clamps negative alpha to it.
        if i == skip or geom[ALPHA] <= _ZERO:
            continue
        to_local(view.planes, pos, mat, local)
        _own_box(numbers[i], geom, chunks[-1], box)
        if box_side(local, box) < 0:
            continue
        if numbers[i, TYPE] != MESH:
            desk.first[i], desk.end[i] = run, run
            continue
        mesh, start = numbers[i, DATA_ID] // 2, run
        at, run = visible_triangles(
            mesh, pos, mat, view, quads, chunks, desk.work, desk.indices, at, desk.runs, run
        )
        if run > start:
            desk.first[i], desk.end[i] = start, run


@compiled
def draw_visible(
    i: int,
    numbers: np.ndarray,
    values: np.ndarray,
    strength: np.float32,
    head: np.ndarray,
    held: Resources,
    desk: Desk,
) -> None:
    """Draw a geom if it is visible."""
    if desk.first[i] >= 0:
        indices, runs = np.int64(desk.indices.ctypes.data), desk.runs[desk.first[i] : desk.end[i]]
        draw_geom(numbers[i], values[i], strength, head, held, desk.brush, indices, runs)


@compiled
def draw_transparent(
    found: int,
    numbers: np.ndarray,
    values: np.ndarray,
    strength: np.float32,
    head: np.ndarray,
    held: Resources,
    desk: Desk,
) -> None:
    """Blend the transparent geoms, front to back and back to front."""
    gl = held.gl
    gl_depth_mask(gl, (0,))
    gl_enable(gl, (BLEND,))
    gl_blend_func(gl, (SRC_ALPHA, ONE_MINUS_SRC_ALPHA))
    for k in range(found):
        draw_visible(desk.order[k], numbers, values, strength, head, held, desk)
    for k in range(found - 1, -1, -1):
        draw_visible(desk.order[k], numbers, values, strength, head, held, desk)
    gl_depth_mask(gl, (1,))
    gl_disable(gl, (BLEND,))


@compiled
def _place_lights(gl: int, lights: np.ndarray, four: np.ndarray) -> None:
    """Set positions and directions of the lights under the present matrix (adjustLight)."""
    for i in range(len(lights)):
        directional, turn = lights[i, 0] != _ZERO, -_ONE if lights[i, 0] != _ZERO else _ONE
        for k in range(3):
            four[k] = turn * lights[i, 4 + k]
        four[3] = _ZERO
        if directional:
            gl_lightfv(gl, (LIGHT0 + i, POSITION, four.ctypes.data))
            continue
        gl_lightfv(gl, (LIGHT0 + i, SPOT_DIRECTION, four.ctypes.data))
        for k in range(3):
            four[k] = lights[i, 1 + k]
        four[3] = _ONE
        gl_lightfv(gl, (LIGHT0 + i, POSITION, four.ctypes.data))


@compiled
def switch_lights(gl: int, count: int, on: bool) -> None:
    """Switch the first ``count`` lights on or off."""
    for i in range(count):
        if on:
            gl_enable(gl, (LIGHT0 + i,))
        else:
            gl_disable(gl, (LIGHT0 + i,))


@compiled
def _multiply_reflection(gl: int, pos: np.ndarray, mat: np.ndarray, matrix: np.ndarray) -> None:
    """Multiply OpenGL's matrix with the reflection at a plane, rounded as mjr_reflect does."""
    axis = (mat[2], mat[5], mat[8])
    for i in range(3):
        a, b, c = axis[i] * axis[0], axis[i] * axis[1], axis[i] * axis[2]
        matrix[4 * i], matrix[4 * i + 1], matrix[4 * i + 2] = -_TWO * a, -_TWO * b, -_TWO * c
        matrix[5 * i] = _ONE - _TWO * (axis[i] * axis[i])
        matrix[4 * i + 3] = _ZERO
        matrix[12 + i] = _TWO * (a * pos[0] + b * pos[1] + c * pos[2])
    matrix[15] = _ONE
    gl_mult_matrixf(gl, (matrix.ctypes.data,))


@compiled
def draw_reflection(
    mirror: int,
    numbers: np.ndarray,
    values: np.ndarray,
    found: int,
    head: np.ndarray,
    view: View,
    lights: np.ndarray,
    chunks: tuple[np.ndarray, ...],
    held: Resources,
    desk: Desk,
) -> None:
    """Draw what the mirror shows, inside the mirror's outline."""
    gl, scratch = held.gl, desk.brush.numbers
    number, geom = numbers[mirror].copy(), values[mirror].copy()
    pos, mat, size = geom[POS : POS + 3], geom[MAT : MAT + 9], geom[SIZE : SIZE + 3]
    if number[TYPE] == BOX:
        number[TYPE] = PLANE
        for k in range(3):
            pos[k] += size[2] * mat[2 + 3 * k]
    if is_behind(head, pos, mat):
        return
    frame = mirror_frame(number, geom)
    left, bottom, width, height = mirror_rectangle(view, frame, size)
    if width == 0 or height == 0:
        return
    eye = head.astype(np.float64)
    image = mirror_view(view, eye, frame, size)
    none = Quads(np.empty((0, 4, 3)), np.empty((0, 2)), np.empty((0, 5, 4)))
    find_visible(numbers, values, mirror, image, none, chunks, desk)

    gl_disable(gl, (DEPTH_TEST,))
    gl_color_mask(gl, (0, 0, 0, 0))
    gl_enable(gl, (STENCIL_TEST,))
    gl_clear(gl, (STENCIL_BUFFER_BIT,))
    gl_stencil_func(gl, (ALWAYS, 1, 0xFF))
    gl_stencil_op(gl, (REPLACE, REPLACE, REPLACE))
    draw_geom(number, geom, _ONE, head, held, desk.brush, np.int64(0), desk.runs[:0])
    gl_enable(gl, (DEPTH_TEST,))
    gl_color_mask(gl, (1, 1, 1, 1))
    gl_stencil_func(gl, (EQUAL, 1, 0xFF))
    gl_stencil_op(gl, (KEEP, KEEP, KEEP))
    gl_scissor(gl, (left, bottom, width, height))
    gl_enable(gl, (SCISSOR_TEST,))

    gl_enable(gl, (CLIP_PLANE0,))
    plane = desk.plane
    plane[0], plane[1], plane[2] = -mat[2], -mat[5], -mat[8]
    plane[3] = pos[0] * mat[2] + pos[1] * mat[5] + pos[2] * mat[8]
    gl_clip_plane(gl, (CLIP_PLANE0, plane.ctypes.data))
    gl_front_face(gl, (CW,))
    gl_push_matrix(gl, ())
    _multiply_reflection(gl, pos, mat, scratch)
    _place_lights(gl, lights, scratch)
    switch_lights(gl, len(lights), True)
    strength = geom[REFLECTANCE]
    for i in range(len(numbers)):
        if not desk.transparent[i]:
            draw_visible(i, numbers, values, strength, head, held, desk)
    draw_transparent(found, numbers, values, strength, head, held, desk)
    switch_lights(gl, len(lights), False)
    gl_disable(gl, (STENCIL_TEST,))
    gl_disable(gl, (CLIP_PLANE0,))
    gl_disable(gl, (SCISSOR_TEST,))
    gl_pop_matrix(gl, ())
    gl_front_face(gl, (CCW,))
    _place_lights(gl, lights, scratch)
