"""Draws a whole image like ``mjr_render``, leaving out what cannot be seen, in compiled code.

The order of passes and of geoms, and all arithmetic that OpenGL sees, are those of
src/render/render_gl3.c of MuJoCo 3.3 without shadows: reflection into the stencilled mirror, the
mirror itself, opaque geoms, skybox, transparent geoms front to back and back to front. The caller
has cleared the image and set up lights and camera with an ``mjr_render`` of an empty scene.
"""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.sim.rendering.software import gl_calls as gl
from vla_gym.sim.rendering.software import scene_memory as mjv
from vla_gym.sim.rendering.software.culling import find_visible, sort_transparent
from vla_gym.sim.rendering.software.draw_geom import CYLINDER_LIST, cube_texture
from vla_gym.sim.rendering.software.draw_passes import (
    draw_reflection,
    draw_transparent,
    draw_visible,
    switch_lights,
)
from vla_gym.sim.rendering.software.hiding_faces import TILE, Quads, find_quads, uncovered_tiles
from vla_gym.sim.rendering.software.structs import Scene
from vla_gym.sim.rendering.software.view import (
    View,
    dot,
    find_mirror,
    make_view,
    mirror_frame,
    subtract,
)

_ZERO, _ONE = np.float32(0), np.float32(1)
# A plane seen from lower than this is drawn everywhere (metres); one behind a face by less as well.
_LOW = 0.2
_CLEARLY_BEHIND = 0.05


@compiled
def _skybox(distance: np.float32, scene: Scene) -> None:
    resources, head, four = scene.resources, scene.head, scene.buffers.numbers
    table = resources.table
    gl.disable(table, (gl.LIGHTING,))
    gl.disable(table, (gl.COLOR_MATERIAL,))
    gl.cull_face(table, (gl.FRONT,))
    gl.push_matrix(table, ())
    gl.translatef(table, (head[0], head[1], head[2]))
    gl.scalef(table, (distance, distance, distance))
    cube_texture(table, resources.skybox, True)
    for axis in range(3):  # the texture's y points up: x, z, -y
        four[:4] = _ZERO
        four[0 if axis == 0 else 3 - axis] = -_ONE if axis == 2 else _ONE
        gl.tex_genfv(table, (gl.TEXTURE_COORD_S + axis, gl.OBJECT_PLANE, four.ctypes.data))
    gl.color4f(table, (_ONE, _ONE, _ONE, _ONE))
    gl.call_list(table, (resources.builtin_lists + CYLINDER_LIST,))
    cube_texture(table, resources.skybox, False)
    gl.pop_matrix(table, ())
    gl.enable(table, (gl.LIGHTING,))
    gl.enable(table, (gl.COLOR_MATERIAL,))
    gl.cull_face(table, (gl.BACK,))


@compiled
def _draw_sky(
    distance: np.float32, quads: Quads, eye: np.ndarray, view: View, scene: Scene
) -> None:
    """Draw the skybox where nothing large is known to hide it."""
    table = scene.resources.table
    tiles = uncovered_tiles(quads, np.ones(len(quads.halves), np.bool_), eye, view)
    gl.enable(table, (gl.SCISSOR_TEST,))
    row = 0
    while row < len(tiles):
        first, end = tiles[row]
        start = row
        while row < len(tiles) and tiles[row, 0] == first and tiles[row, 1] == end:
            row += 1
        if end > first:
            gl.scissor(
                table, (first * TILE, start * TILE, (end - first) * TILE, (row - start) * TILE)
            )
            _skybox(distance, scene)
    gl.disable(table, (gl.SCISSOR_TEST,))


@compiled
def _draw_plane(i: int, quads: Quads, view: View, scene: Scene) -> None:
    """Draw an opaque plane within the rectangle where nothing large is known to hide it."""
    eye, geom = scene.head.astype(np.float64), scene.values[i]
    frame, size = mirror_frame(scene.numbers[i], geom), geom[mjv.SIZE : mjv.SIZE + 2]
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
        table = scene.resources.table
        gl.enable(table, (gl.SCISSOR_TEST,))
        gl.scissor(table, (first * TILE, low * TILE, (end - first) * TILE, (high - low) * TILE))
        draw_visible(i, scene, _ONE)
        gl.disable(table, (gl.SCISSOR_TEST,))


@compiled
def draw_scene(
    scene: Scene,
    axes: tuple[np.ndarray, np.ndarray, np.ndarray],
    optics: tuple[float, float, float, float],
    size: tuple[int, int],
    reflections: bool,
    samples: np.ndarray,
) -> None:
    """Draw an image of a scene.

    Args:
        scene: What is drawn.
        axes: float64 (3,) each: camera position, forward and up direction.
        optics: Tangents of half the opening angle in x and y, near distance, radius of the sky.
        size: Width and height in pixels.
        reflections: Whether mirrors reflect.
        samples: float32 (4, 2) where pixels are sampled.
    """
    numbers, lights, buffers = scene.numbers, len(scene.lights), scene.buffers
    if len(numbers) == 0:
        return
    table, eye = scene.resources.table, axes[0]
    view = make_view(axes, optics, size, samples)
    buffers.material[:] = np.nan
    gl.active_texture(table, (gl.TEXTURE0,))
    found = sort_transparent(scene)
    mirror = find_mirror(numbers, scene.values, buffers.transparent)
    if reflections and mirror >= 0:
        draw_reflection(mirror, found, scene, view)
    quads = find_quads(numbers, scene.values, eye, view)
    find_visible(scene, int(np.int64(-1)), view, quads)
    switch_lights(table, lights, True)
    if mirror >= 0:
        gl.enable(table, (gl.BLEND,))
        gl.blend_func(table, (gl.ONE, gl.ONE))
        draw_visible(mirror, scene, _ONE)
        gl.disable(table, (gl.BLEND,))
    for i in range(len(numbers)):
        if buffers.transparent[i] or i == mirror or buffers.first[i] < 0:
            continue
        if numbers[i, mjv.TYPE] == mjv.PLANE:
            _draw_plane(i, quads, view, scene)
        else:
            draw_visible(i, scene, _ONE)
    switch_lights(table, lights, False)
    if scene.resources.skybox >= 0:
        _draw_sky(np.float32(optics[3]), quads, eye, view, scene)
        buffers.material[:] = np.nan
    switch_lights(table, lights, True)
    draw_transparent(found, scene, _ONE)
    switch_lights(table, lights, False)
