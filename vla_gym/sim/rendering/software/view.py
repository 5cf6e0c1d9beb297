"""What a camera can see: its frustum, its mirror image, large faces that hide what is behind them.

Everything here only decides what need not be drawn, so all bounds are on the safe side: frusta are
wider, hiding faces smaller than they are.

A plane is a row (a, b, c, d): points with ``a x + b y + c z + d >= 0`` are on its inner side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vla_gym.sim.compiled import compiled, copy_vector
from vla_gym.sim.rendering.software.scene_memory import (
    BOX,
    MAT,
    PLANE,
    POS,
    REFLECTANCE,
    SIZE,
    TYPE,
)

# The frustum that is tested is this much wider than the camera's.
WIDER = 1.01
# Faces that hide others shrink, mirrors grow by this many pixels at each edge.
EDGE_PIXELS = 3.0


class View(NamedTuple):
    """A camera, or its mirror image, during one pass.

    Attributes:
        rows: float64 (3, 4): right, up and forward coordinates of a point (x, y, z, 1), metres.
        planes: float64 (P, 4): the frustum's sides (4); of a mirror image also the mirror's plane
            and its four edges.
        lens: float32 (7,): widened tangents of half the opening angles in x and y, focal length
            in pixels, image centre x and y, near distance, twice that.
        sign: float32 1, or -1 for a mirror image: it turns front faces around.
        samples: float32 (4, 2): where pixels are sampled, in pixels.
    """

    rows: np.ndarray
    planes: np.ndarray
    lens: np.ndarray
    sign: np.float32
    samples: np.ndarray


@compiled
def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return the product of two vectors (3,); quicker to compile than NumPy's."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@compiled
def cross(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with the vector product of two vectors (3,)."""
    out[0] = a[1] * b[2] - a[2] * b[1]
    out[1] = a[2] * b[0] - a[0] * b[2]
    out[2] = a[0] * b[1] - a[1] * b[0]


@compiled
def subtract(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with the difference of two vectors (3,)."""
    for k in range(3):
        out[k] = a[k] - b[k]


@compiled
def make_view(
    axes: tuple[np.ndarray, np.ndarray, np.ndarray],
    optics: tuple[float, float, float, float],
    size: tuple[int, int],
    samples: np.ndarray,
) -> View:
    """Return the view of a camera; see ``draw_scene`` for the arguments."""
    head, forward, up = axes
    rows = np.empty((3, 4))
    cross(forward, up, rows[0])
    for k in range(3):
        rows[1, k], rows[2, k] = up[k], forward[k]
    for k in range(3):
        rows[k, 3] = -dot(rows[k], head)
    tan_x, tan_y = optics[0] * WIDER, optics[1] * WIDER
    planes = np.empty((4, 4))
    for side in range(4):
        axis, tangent = side // 2, tan_x if side < 2 else tan_y
        turn = 1.0 if side % 2 == 0 else -1.0
        for k in range(4):
            planes[side, k] = (turn * rows[axis, k] + tangent * rows[2, k]) / np.sqrt(
                1 + tangent * tangent
            )
    (width, height), near = size, optics[2]
    lens = np.empty(7, np.float32)
    lens[0], lens[1], lens[2] = tan_x, tan_y, height / 2 / optics[1]
    lens[3], lens[4], lens[5], lens[6] = width / 2, height / 2, near, 2 * near
    return View(rows, planes, lens, np.float32(1), samples)


@compiled
def edge_planes(
    eye: np.ndarray, frame: np.ndarray, half_a: Any, half_b: Any, planes: np.ndarray
) -> None:
    """Fill (4, 4) planes through the eye and the edges of a quad, inner side towards its middle."""
    corners = np.empty((4, 3))
    for k in range(3):
        a, b = half_a * frame[2, k], half_b * frame[3, k]
        corners[0, k] = frame[0, k] + a + b
        corners[1, k] = frame[0, k] - a + b
        corners[2, k] = frame[0, k] - a - b
        corners[3, k] = frame[0, k] + a - b
    first, second, normal = np.empty(3), np.empty(3), np.empty(3)
    for i in range(4):
        subtract(corners[i], eye, first)
        subtract(corners[(i + 1) % 4], eye, second)
        cross(first, second, normal)
        subtract(frame[0], eye, first)
        length = np.sqrt(dot(normal, normal))
        if dot(normal, first) < 0:
            length = -length
        for k in range(3):
            planes[i, k] = normal[k] / length
        planes[i, 3] = -dot(planes[i], eye)


@compiled
def reach(eye: np.ndarray, frame: np.ndarray, half_a: Any, half_b: Any) -> Any:
    """Return the distance from the eye to the farthest point of a quad, or a little more."""
    away = np.empty(3)
    subtract(frame[0], eye, away)
    return np.sqrt(dot(away, away)) + np.sqrt(half_a * half_a + half_b * half_b)


@compiled
def mirror_frame(number: np.ndarray, geom: np.ndarray) -> np.ndarray:
    """Return (4, 3) centre, normal and axes of the reflecting side of a plane or box."""
    frame = np.empty((4, 3))
    for k in range(3):
        frame[1, k] = geom[MAT + 3 * k + 2]
        frame[2, k], frame[3, k] = geom[MAT + 3 * k], geom[MAT + 3 * k + 1]
        frame[0, k] = geom[POS + k]
        if number[TYPE] != PLANE:
            frame[0, k] += geom[SIZE + 2] * frame[1, k]
    return frame


@compiled
def mirror_view(view: View, eye: np.ndarray, frame: np.ndarray, size: np.ndarray) -> View:
    """Return the mirror image of a view that looks out through a quad of half sizes ``size``."""
    rows, planes, image = np.empty((3, 4)), np.empty((9, 4)), np.empty(3)
    for k in range(3):
        _reflect(view.rows[k], frame, rows[k])
    for k in range(4):
        _reflect(view.planes[k], frame, planes[k])
    subtract(eye, frame[0], image)
    height = dot(image, frame[1])
    for k in range(3):
        image[k] = eye[k] - 2 * height * frame[1, k]
        planes[4, k] = frame[1, k]
    planes[4, 3] = -dot(frame[1], frame[0])
    edge = EDGE_PIXELS * reach(eye, frame, size[0], size[1]) / view.lens[2] + 0.001
    edge_planes(image, frame, size[0] + edge, size[1] + edge, planes[5:])
    return View(rows, planes, view.lens, np.float32(-1), view.samples)


@compiled
def _reflect(plane: np.ndarray, frame: np.ndarray, out: np.ndarray) -> None:
    """Fill the mirror image of a plane, or of a row that measures a coordinate."""
    along = dot(plane, frame[1])
    for k in range(3):
        out[k] = plane[k] - 2 * along * frame[1, k]
    out[3] = plane[3] + 2 * along * dot(frame[1], frame[0])


@compiled
def mirror_rectangle(view: View, frame: np.ndarray, size: np.ndarray) -> tuple[int, int, int, int]:
    """Return left, bottom, width, height in pixels of where a quad may be seen; width 0: nowhere.

    Args:
        view: The camera's view.
        frame: Centre, normal and axes of the quad.
        size: Its half sizes, (>= 2,).
    """
    polygon, count = np.zeros((16, 3)), 4
    for i in range(4):
        a, b = (1.0 if i in (0, 3) else -1.0) * size[0], (1.0 if i < 2 else -1.0) * size[1]
        for k in range(3):
            polygon[i, k] = frame[0, k] + a * frame[2, k] + b * frame[3, k]
    cut = np.zeros((16, 3))
    near = view.rows[2].copy()
    near[3] -= 0.99 * view.lens[5]
    for side in range(5):
        plane = near if side == 4 else view.planes[side]
        kept = 0
        for i in range(count):
            here, there = polygon[i], polygon[(i + 1) % count]
            d0, d1 = dot(plane, here) + plane[3], dot(plane, there) + plane[3]
            if d0 >= 0:
                copy_vector(here, cut[kept])
                kept += 1
            if (d0 >= 0) != (d1 >= 0):
                for k in range(3):
                    cut[kept, k] = here[k] + (there[k] - here[k]) * (d0 / (d0 - d1))
                kept += 1
        polygon, cut, count = cut, polygon, kept
    width, height = int(2 * view.lens[3]), int(2 * view.lens[4])
    left, right, bottom, top = width, 0, height, 0
    for i in range(count):
        depth = dot(view.rows[2], polygon[i]) + view.rows[2, 3]
        scale = view.lens[2] / depth
        x = view.lens[3] + scale * (dot(view.rows[0], polygon[i]) + view.rows[0, 3])
        y = view.lens[4] + scale * (dot(view.rows[1], polygon[i]) + view.rows[1, 3])
        left, right = min(left, int(x) - 3), max(right, int(x) + 3)
        bottom, top = min(bottom, int(y) - 3), max(top, int(y) + 3)
    left, bottom = max(left, 0), max(bottom, 0)
    return left, bottom, max(0, min(right, width) - left), max(0, min(top, height) - bottom)


@compiled
def find_mirror(numbers: np.ndarray, values: np.ndarray, transparent: np.ndarray) -> int:
    """Return the geom that reflects, or -1: the first plane or box that can (mjr_render)."""
    for i in range(len(numbers)):
        kind = numbers[i, TYPE]
        if (
            (kind == PLANE or kind == BOX)
            and not transparent[i]
            and values[i, REFLECTANCE] > np.float32(0)
        ):
            return i
    return -1
