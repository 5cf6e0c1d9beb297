"""Large faces of boxes, such as a table's top: what lies behind them need not be drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vla_gym.sim.compiled import compiled, copy_matrix, copy_vector
from vla_gym.sim.rendering.software.scene_memory import ALPHA, BOX, MAT, POS, SIZE, TYPE
from vla_gym.sim.rendering.software.view import EDGE_PIXELS, View, dot, edge_planes, reach, subtract

# A face is worth a test if it looks at least this large: area / distance^2; and if it covers that
# many of the 8 x 8 points of a grid on the image.
_MIN_SOLID_ANGLE = 0.02
_MIN_HITS, _GRID = 2, 8
MAX_QUADS = 4
TILE = 32
# Opaque from here on (mjr_render).
OPAQUE = 0.995


class Quads(NamedTuple):
    """Faces of boxes that hide what lies behind them, the largest first; K of them.

    Attributes:
        frames: float64 (K, 4, 3): centre, outward normal, two axes of length one.
        halves: float64 (K, 2): half sizes along the axes.
        planes: float64 (K, 5, 4): behind the face, then within its four edges.
    """

    frames: np.ndarray
    halves: np.ndarray
    planes: np.ndarray


@compiled
def _meets(frame: np.ndarray, halves: np.ndarray, eye: np.ndarray, ray: np.ndarray) -> bool:
    """Tell whether a ray from the eye goes through a quad, not at a grazing angle."""
    slope = height = 0.0
    for k in range(3):
        slope -= frame[1, k] * ray[k]
        height += frame[1, k] * (eye[k] - frame[0, k])
    if slope < 0.02:
        return False
    a = b = 0.0
    for k in range(3):
        hit = eye[k] + ray[k] * (height / slope) - frame[0, k]
        a += hit * frame[2, k]
        b += hit * frame[3, k]
    return abs(a) <= halves[0] and abs(b) <= halves[1]


@compiled
def _grid_hits(frame: np.ndarray, halves: np.ndarray, eye: np.ndarray, view: View) -> int:
    """Return how many of a grid of rays through the image meet a quad."""
    hits, ray = 0, np.empty(3)
    for i in range(_GRID * _GRID):
        x = (2 * (i % _GRID) + 1.0 - _GRID) / _GRID * view.lens[0]
        y = (2 * (i // _GRID) + 1.0 - _GRID) / _GRID * view.lens[1]
        for k in range(3):
            ray[k] = view.rows[2, k] + x * view.rows[0, k] + y * view.rows[1, k]
        hits += _meets(frame, halves, eye, ray)
    return hits


@compiled
def _put(frame: np.ndarray, half: np.ndarray, to_frame: np.ndarray, to_half: np.ndarray) -> None:
    copy_matrix(frame, to_frame)
    copy_vector(half, to_half)


@compiled
def find_quads(numbers: np.ndarray, values: np.ndarray, eye: np.ndarray, view: View) -> Quads:
    """Return the largest faces of opaque boxes that the eye sees.

    Args:
        numbers: int32 (n, 59) geoms of the scene.
        values: The same memory as float32.
        eye: float64 (3,).
        view: The camera's view.
    """
    frames, halves = np.zeros((MAX_QUADS, 4, 3)), np.zeros((MAX_QUADS, 2))
    scores, inner = np.zeros(MAX_QUADS, np.int64), np.empty(2)
    frame, to_eye, found = np.empty((4, 3)), np.empty(3), 0
    for i in range(len(numbers)):
        geom = values[i]
        if numbers[i, TYPE] != BOX or geom[ALPHA] < OPAQUE:
            continue
        for side in range(6):
            axis, turn = side // 2, 1.0 if side % 2 == 0 else -1.0
            first, second = (axis + 1) % 3, (axis + 2) % 3
            for k in range(3):
                frame[1, k] = turn * geom[MAT + 3 * k + axis]
                frame[0, k] = geom[POS + k] + frame[1, k] * geom[SIZE + axis]
                frame[2, k] = geom[MAT + 3 * k + first]
                frame[3, k] = geom[MAT + 3 * k + second]
            half_a, half_b = np.float64(geom[SIZE + first]), np.float64(geom[SIZE + second])
            subtract(eye, frame[0], to_eye)
            height, distance = dot(to_eye, frame[1]), np.sqrt(dot(to_eye, to_eye))
            # The near plane must not cut a hole into the face: every ray of the image that
            # meets it must do so well beyond that plane.
            if height < 0.1 * distance or height < 10 * view.lens[5]:
                continue
            if 4 * half_a * half_b * height < _MIN_SOLID_ANGLE * distance**3:
                continue
            edge = EDGE_PIXELS * reach(eye, frame, half_a, half_b) / view.lens[2] + 0.001
            inner[0], inner[1] = half_a - edge, half_b - edge
            score = _grid_hits(frame, inner, eye, view)
            if score < _MIN_HITS or (found == MAX_QUADS and scores[found - 1] >= score):
                continue
            at = min(found, MAX_QUADS - 1)
            while at > 0 and scores[at - 1] < score:
                _put(frames[at - 1], halves[at - 1], frames[at], halves[at])
                scores[at] = scores[at - 1]
                at -= 1
            _put(frame, inner, frames[at], halves[at])
            scores[at] = score
            found = min(found + 1, MAX_QUADS)
    planes = np.empty((found, 5, 4))
    for i in range(found):
        for k in range(3):
            planes[i, 0, k] = -frames[i, 1, k]
        planes[i, 0, 3] = dot(frames[i, 1], frames[i, 0])
        edge_planes(eye, frames[i], halves[i, 0], halves[i, 1], planes[i, 1:])
    return Quads(frames[:found], halves[:found], planes)


@compiled
def uncovered_tiles(quads: Quads, behind: np.ndarray, eye: np.ndarray, view: View) -> np.ndarray:
    """Return int64 (rows, 2): first and end column of the tiles where a background may show.

    Tiles are :data:`TILE` pixels wide and high, rows counted from below; first = end: none.

    Args:
        quads: Faces that may hide the background.
        behind: bool (K,): whether the background is behind each face's plane.
        eye: float64 (3,).
        view: The camera's view.
    """
    centre_x, centre_y, focal = view.lens[3], view.lens[4], view.lens[2]
    columns, rows = int(np.ceil(2 * centre_x / TILE)), int(np.ceil(2 * centre_y / TILE))
    result = np.zeros((rows, 2), np.int64)
    ray = np.empty(3)
    for row in range(rows):
        first, end = columns, 0
        for column in range(columns):
            covered = False
            for q in range(len(behind)):
                if not behind[q]:
                    continue
                inside = True
                for corner in range(4):
                    x = (column + corner % 2) * TILE + (corner % 2) * 4 - 2 - centre_x
                    y = (row + corner // 2) * TILE + (corner // 2) * 4 - 2 - centre_y
                    for k in range(3):
                        ray[k] = (
                            view.rows[2, k] + (view.rows[0, k] * x + view.rows[1, k] * y) / focal
                        )
                    inside = inside and _meets(quads.frames[q], quads.halves[q], eye, ray)
                    if not inside:
                        break
                if inside:
                    covered = True
                    break
            if not covered:
                first, end = min(first, column), column + 1
        if end > 0:
            result[row, 0], result[row, 1] = first, end
    return result
