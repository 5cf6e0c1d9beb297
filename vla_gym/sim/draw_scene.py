"""Draws a whole image like ``mjr_render``, leaving out what cannot be seen, in compiled code.

The order of passes and of geoms, and all arithmetic that OpenGL sees, are those of
src/render/render_gl3.c of MuJoCo 3.3 without shadows: reflection into the stencilled mirror, the
mirror itself, opaque geoms, skybox, transparent geoms front to back and back to front. The caller
has cleared the image and set up lights and camera with an ``mjr_render`` of an empty scene.
"""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.sim.draw_geoms import (
    CYLINDER_LIST,
    Resources,
    cube_texture,
)
from vla_gym.sim.draw_passes import (
    Desk,
    draw_reflection,
    draw_transparent,
    draw_visible,
    find_visible,
    sort_transparent,
    switch_lights,
)
from vla_gym.sim.gl_calls import (
    BACK,
    BLEND,
    COLOR_MATERIAL,
    FRONT,
    LIGHTING,
    OBJECT_PLANE,
    ONE,
    SCISSOR_TEST,
    TEXTURE0,
    TEXTURE_COORD_S,
    gl_active_texture,
    gl_blend_func,
    gl_call_list,
    gl_color4f,
    gl_cull_face,
    gl_disable,
    gl_enable,
    gl_pop_matrix,
    gl_push_matrix,
    gl_scalef,
    gl_scissor,
    gl_tex_genfv,
    gl_translatef,
)
from vla_gym.sim.hiding_faces import TILE, Quads, find_quads, uncovered_tiles
from vla_gym.sim.render_views import (
    View,
    dot,
    find_mirror,
    make_view,
    mirror_frame,
    subtract,
)
from vla_gym.sim.scene_memory import (
    PLANE,
    SIZE,
    TYPE,
)

_ZERO, _ONE = np.float32(0), np.float32(1)
# A plane seen from lower than this is drawn everywhere (metres); one behind a face by less as well.
_LOW = 0.2
_CLEARLY_BEHIND = 0.05


@compiled
def _skybox(distance: np.float32, head: np.ndarray, held: Resources, desk: Desk) -> None:
    gl, four = held.gl, desk.brush.numbers
    gl_disable(gl, (LIGHTING,))
    gl_disable(gl, (COLOR_MATERIAL,))
    gl_cull_face(gl, (FRONT,))
    gl_push_matrix(gl, ())
    gl_translatef(gl, (head[0], head[1], head[2]))
    gl_scalef(gl, (distance, distance, distance))
    cube_texture(gl, held.skybox, True)
    for axis in range(3):  # the texture's y points up: x, z, -y
        four[:4] = _ZERO
        four[0 if axis == 0 else 3 - axis] = -_ONE if axis == 2 else _ONE
        gl_tex_genfv(gl, (TEXTURE_COORD_S + axis, OBJECT_PLANE, four.ctypes.data))
    gl_color4f(gl, (_ONE, _ONE, _ONE, _ONE))
    gl_call_list(gl, (held.builtin_lists + CYLINDER_LIST,))
    cube_texture(gl, held.skybox, False)
    gl_pop_matrix(gl, ())
    gl_enable(gl, (LIGHTING,))
    gl_enable(gl, (COLOR_MATERIAL,))
    gl_cull_face(gl, (BACK,))


@compiled
def _draw_sky(
    distance: np.float32,
    quads: Quads,
    eye: np.ndarray,
    view: View,
    head: np.ndarray,
    held: Resources,
    desk: Desk,
) -> None:
    """Draw the skybox where nothing large is known to hide it."""
    gl = held.gl
    tiles = uncovered_tiles(quads, np.ones(len(quads.halves), np.bool_), eye, view)
    gl_enable(gl, (SCISSOR_TEST,))
    row = 0
    while row < len(tiles):
        first, end = tiles[row]
        start = row
        while row < len(tiles) and tiles[row, 0] == first and tiles[row, 1] == end:
            row += 1
        if end > first:
            gl_scissor(gl, (first * TILE, start * TILE, (end - first) * TILE, (row - start) * TILE))
            _skybox(distance, head, held, desk)
    gl_disable(gl, (SCISSOR_TEST,))


@compiled
def _draw_plane(
    i: int,
    numbers: np.ndarray,
    values: np.ndarray,
    quads: Quads,
    view: View,
    head: np.ndarray,
    held: Resources,
    desk: Desk,
) -> None:
    """Draw an opaque plane within the rectangle where nothing large is known to hide it."""
    eye, frame = head.astype(np.float64), mirror_frame(numbers[i], values[i])
    size = values[i, SIZE : SIZE + 2]
    behind = np.zeros(len(quads.halves), np.bool_)
    point = np.empty(3)
    subtract(eye, frame[0], point)
    if dot(point, frame[1]) > _LOW:
        for q in range(len(behind)):
            behind[q] = True
            for corner in range(4):
                a = size[0] if corner % 2 else -size[0]
                b = size[1] if corner // 2 else -size[1]
                for k in range(3):
                    point[k] = frame[0, k] + a * frame[2, k] + b * frame[3, k]
                face = quads.planes[q, 0]
                behind[q] = behind[q] and dot(face, point) + face[3] > _CLEARLY_BEHIND
    tiles = uncovered_tiles(quads, behind, eye, view)
    first, end, low, high = 1 << 20, 0, len(tiles), 0
    for row in range(len(tiles)):
        if tiles[row, 1] > 0:
            first, end = min(first, tiles[row, 0]), max(end, tiles[row, 1])
            low, high = min(low, row), row + 1
    if end > 0:
        gl = held.gl
        gl_enable(gl, (SCISSOR_TEST,))
        gl_scissor(gl, (first * TILE, low * TILE, (end - first) * TILE, (high - low) * TILE))
        draw_visible(i, numbers, values, _ONE, head, held, desk)
        gl_disable(gl, (SCISSOR_TEST,))


@compiled
def draw_scene(
    numbers: np.ndarray,
    values: np.ndarray,
    lights: np.ndarray,
    axes: tuple[np.ndarray, np.ndarray, np.ndarray],
    optics: tuple[float, float, float, float],
    size: tuple[int, int],
    reflections: bool,
    samples: np.ndarray,
    chunks: tuple[np.ndarray, ...],
    held: Resources,
    desk: Desk,
) -> None:
    """Draw an image of a scene.

    Args:
        numbers: int32 (n, 59) geoms.
        values: The same memory as float32.
        lights: float32 (nlight, 7), see ``scene_memory.light_rows``.
        axes: float64 (3,) each: camera position, forward and up direction.
        optics: Tangents of half the opening angle in x and y, near distance, radius of the sky.
        size: Width and height in pixels.
        reflections: Whether mirrors reflect.
        samples: float32 (4, 2) where pixels are sampled.
        chunks: Fields of ``MeshChunks`` from ``positions`` on.
        held: OpenGL's resources.
        desk: Working memory.
    """
    if len(numbers) == 0:
        return
    gl, eye = held.gl, axes[0]
    head = eye.astype(np.float32)
    view = make_view(eye, axes[1], axes[2], (optics[0], optics[1]), optics[2], size, samples)
    desk.brush.last[:] = np.nan
    gl_active_texture(gl, (TEXTURE0,))
    found = sort_transparent(numbers, values, head, desk)
    mirror = find_mirror(numbers, values, desk.transparent)
    if reflections and mirror >= 0:
        draw_reflection(mirror, numbers, values, found, head, view, lights, chunks, held, desk)
    quads = find_quads(numbers, values, eye, view)
    find_visible(numbers, values, int(np.int64(-1)), view, quads, chunks, desk)
    switch_lights(gl, len(lights), True)
    if mirror >= 0:
        gl_enable(gl, (BLEND,))
        gl_blend_func(gl, (ONE, ONE))
        draw_visible(mirror, numbers, values, _ONE, head, held, desk)
        gl_disable(gl, (BLEND,))
    for i in range(len(numbers)):
        if desk.transparent[i] or i == mirror or desk.first[i] < 0:
            continue
        if numbers[i, TYPE] == PLANE:
            _draw_plane(i, numbers, values, quads, view, head, held, desk)
        else:
            draw_visible(i, numbers, values, _ONE, head, held, desk)
    switch_lights(gl, len(lights), False)
    if held.skybox >= 0:
        _draw_sky(np.float32(optics[3]), quads, eye, view, head, held, desk)
        desk.brush.last[:] = np.nan
    switch_lights(gl, len(lights), True)
    draw_transparent(found, numbers, values, _ONE, head, held, desk)
    switch_lights(gl, len(lights), False)
