"""The passes of an image: visible geoms, transparent ones, what a mirror shows."""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.sim.rendering.software import gl_calls as gl
from vla_gym.sim.rendering.software import scene_memory as mjv
from vla_gym.sim.rendering.software.culling import find_visible
from vla_gym.sim.rendering.software.draw_geom import draw_geom, is_behind
from vla_gym.sim.rendering.software.hiding_faces import Quads
from vla_gym.sim.rendering.software.structs import Scene
from vla_gym.sim.rendering.software.view import View, mirror_frame, mirror_rectangle, mirror_view

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)


@compiled
def draw_visible(i: int, scene: Scene, strength: np.float32) -> None:
    """Draw a geom if it is visible."""
    found = scene.buffers
    if found.first[i] >= 0:
        runs = found.runs[found.first[i] : found.end[i]]
        draw_geom(scene.numbers[i], scene.values[i], strength, scene, runs)


@compiled
def draw_transparent(count: int, scene: Scene, strength: np.float32) -> None:
    """Blend the transparent geoms, front to back and back to front."""
    table, order = scene.resources.table, scene.buffers.order
    gl.depth_mask(table, (0,))
    gl.enable(table, (gl.BLEND,))
    gl.blend_func(table, (gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA))
    for k in range(count):
        draw_visible(order[k], scene, strength)
    for k in range(count - 1, -1, -1):
        draw_visible(order[k], scene, strength)
    gl.depth_mask(table, (1,))
    gl.disable(table, (gl.BLEND,))


@compiled
def _place_lights(table: int, lights: np.ndarray, four: np.ndarray) -> None:
    """Set positions and directions of the lights under the present matrix (adjustLight)."""
    for i in range(len(lights)):
        directional, turn = lights[i, 0] != _ZERO, -_ONE if lights[i, 0] != _ZERO else _ONE
        for k in range(3):
            four[k] = turn * lights[i, 4 + k]
        four[3] = _ZERO
        if directional:
            gl.lightfv(table, (gl.LIGHT0 + i, gl.POSITION, four.ctypes.data))
            continue
        gl.lightfv(table, (gl.LIGHT0 + i, gl.SPOT_DIRECTION, four.ctypes.data))
        for k in range(3):
            four[k] = lights[i, 1 + k]
        four[3] = _ONE
        gl.lightfv(table, (gl.LIGHT0 + i, gl.POSITION, four.ctypes.data))


@compiled
def switch_lights(table: int, count: int, on: bool) -> None:
    """Switch the first ``count`` lights on or off."""
    for i in range(count):
        if on:
            gl.enable(table, (gl.LIGHT0 + i,))
        else:
            gl.disable(table, (gl.LIGHT0 + i,))


@compiled
def _multiply_reflection(table: int, pos: np.ndarray, mat: np.ndarray, matrix: np.ndarray) -> None:
    """Multiply OpenGL's matrix with the reflection at a plane, rounded as mjr_reflect does."""
    axis = (mat[2], mat[5], mat[8])
    for i in range(3):
        a, b, c = axis[i] * axis[0], axis[i] * axis[1], axis[i] * axis[2]
        matrix[4 * i], matrix[4 * i + 1], matrix[4 * i + 2] = -_TWO * a, -_TWO * b, -_TWO * c
        matrix[5 * i] = _ONE - _TWO * (axis[i] * axis[i])
        matrix[4 * i + 3] = _ZERO
        matrix[12 + i] = _TWO * (a * pos[0] + b * pos[1] + c * pos[2])
    matrix[15] = _ONE
    gl.mult_matrixf(table, (matrix.ctypes.data,))


@compiled
def draw_reflection(mirror: int, transparent: int, scene: Scene, view: View) -> None:
    """Draw what the mirror shows, inside the mirror's outline.

    Args:
        mirror: The geom that reflects.
        transparent: How many geoms of the scene are transparent.
        scene: What is drawn.
        view: The camera's view.
    """
    table, head, lights = scene.resources.table, scene.head, scene.lights
    number, geom = scene.numbers[mirror].copy(), scene.values[mirror].copy()
    pos, mat, size = mjv.placement(geom)
    if number[mjv.TYPE] == mjv.BOX:
        number[mjv.TYPE] = mjv.PLANE
        for k in range(3):
            pos[k] += size[2] * mat[2 + 3 * k]
    if is_behind(head, pos, mat):
        return
    frame = mirror_frame(number, geom)
    left, bottom, width, height = mirror_rectangle(view, frame, size)
    if width == 0 or height == 0:
        return
    image = mirror_view(view, head.astype(np.float64), frame, size)
    none = Quads(np.empty((0, 4, 3)), np.empty((0, 2)), np.empty((0, 5, 4)))
    find_visible(scene, mirror, image, none)

    gl.disable(table, (gl.DEPTH_TEST,))
    gl.color_mask(table, (0, 0, 0, 0))
    gl.enable(table, (gl.STENCIL_TEST,))
    gl.clear(table, (gl.STENCIL_BUFFER_BIT,))
    gl.stencil_func(table, (gl.ALWAYS, 1, 0xFF))
    gl.stencil_op(table, (gl.REPLACE, gl.REPLACE, gl.REPLACE))
    draw_geom(number, geom, _ONE, scene, scene.buffers.runs[:0])
    gl.enable(table, (gl.DEPTH_TEST,))
    gl.color_mask(table, (1, 1, 1, 1))
    gl.stencil_func(table, (gl.EQUAL, 1, 0xFF))
    gl.stencil_op(table, (gl.KEEP, gl.KEEP, gl.KEEP))
    gl.scissor(table, (left, bottom, width, height))
    gl.enable(table, (gl.SCISSOR_TEST,))

    gl.enable(table, (gl.CLIP_PLANE0,))
    plane, scratch = scene.buffers.plane, scene.buffers.numbers
    plane[0], plane[1], plane[2] = -mat[2], -mat[5], -mat[8]
    plane[3] = pos[0] * mat[2] + pos[1] * mat[5] + pos[2] * mat[8]
    gl.clip_plane(table, (gl.CLIP_PLANE0, plane.ctypes.data))
    gl.front_face(table, (gl.CW,))
    gl.push_matrix(table, ())
    _multiply_reflection(table, pos, mat, scratch)
    _place_lights(table, lights, scratch)
    switch_lights(table, len(lights), True)
    strength = geom[mjv.REFLECTANCE]
    for i in range(len(scene.numbers)):
        if not scene.buffers.transparent[i]:
            draw_visible(i, scene, strength)
    draw_transparent(transparent, scene, strength)
    switch_lights(table, len(lights), False)
    gl.disable(table, (gl.STENCIL_TEST,))
    gl.disable(table, (gl.CLIP_PLANE0,))
    gl.disable(table, (gl.SCISSOR_TEST,))
    gl.pop_matrix(table, ())
    gl.front_face(table, (gl.CCW,))
    _place_lights(table, lights, scratch)
