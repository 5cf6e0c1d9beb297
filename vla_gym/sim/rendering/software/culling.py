"""Which geoms, and which triangles of meshes, a camera may see; see :mod:`.triangle_tests`."""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled, copy_vector
from vla_gym.sim.rendering.software import scene_memory as mjv
from vla_gym.sim.rendering.software.draw_geom import is_behind
from vla_gym.sim.rendering.software.hiding_faces import OPAQUE, Quads
from vla_gym.sim.rendering.software.structs import Scene
from vla_gym.sim.rendering.software.triangle_tests import (
    EPS,
    MARGIN,
    ROUNDING,
    any_cut,
    gather,
    judge,
    mark_hidden,
    mark_mirror,
    project,
)
from vla_gym.sim.rendering.software.view import View

_ZERO = np.float32(0)
_FAR_AWAY = np.float32(1e10)


@compiled
def to_local(planes: np.ndarray, pos: np.ndarray, mat: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with planes (P, 4) in a frame with position (3,) and rotation (9,)."""
    for i in range(len(planes)):
        a, b, c = planes[i, 0], planes[i, 1], planes[i, 2]
        for k in range(3):
            out[i, k] = a * mat[k] + b * mat[3 + k] + c * mat[6 + k]
        out[i, 3] = planes[i, 3] + a * pos[0] + b * pos[1] + c * pos[2]


@compiled
def box_side(planes: np.ndarray, box: np.ndarray) -> int:
    """Return where a box lies: -1 outside of a plane, 1 inside of all planes, else 0."""
    result = 1
    for i in range(len(planes)):
        a, b, c = planes[i, 0], planes[i, 1], planes[i, 2]
        distance = a * box[0] + b * box[1] + c * box[2] + planes[i, 3]
        reach = abs(a) * box[3] + abs(b) * box[4] + abs(c) * box[5] + MARGIN
        if distance < -reach:
            return -1
        if not distance > reach:
            result = 0
    return result


@compiled
def _float32(planes: np.ndarray) -> np.ndarray:
    return planes.astype(np.float32)


@compiled
def _hiding_face(
    quads: Quads, pos: np.ndarray, mat: np.ndarray, box: np.ndarray, face: np.ndarray
) -> bool:
    """Fill the planes (5, 4) of the first face that hides a part of a box; they come by size."""
    for q in range(len(quads.planes)):
        to_local(quads.planes[q], pos, mat, face)
        if box_side(face, box) >= 0:
            return True
    return False


@compiled
def _append(
    triangles: np.ndarray, first: int, count: int, kept: np.ndarray, out: np.ndarray, at: int
) -> int:
    """Append the vertex numbers of a chunk's triangles that are kept; return the new end."""
    for t in range(count):
        if kept[t]:
            for k in range(3):
                out[at + k] = triangles[first + t, k]
            at += 3
    return at


@compiled
def _close_run(start: int, at: int, runs: np.ndarray, run: int) -> int:
    """Note a run if it is not empty; return the new end of ``runs``."""
    if at == start:
        return run
    runs[run, 0], runs[run, 1] = start, at - start
    return run + 1


@compiled
def _visible_triangles(
    mesh: int,
    pos: np.ndarray,
    mat: np.ndarray,
    scene: Scene,
    view: View,
    quads: Quads,
    at: int,
    run: int,
) -> tuple[int, int]:
    """Append the vertex numbers of a mesh's visible triangles, in runs to draw at once.

    Args:
        mesh: Number of the mesh.
        pos: float32 (3,) position of the geom.
        mat: float32 (9,) its rotation.
        scene: Its buffers ``indices`` and ``runs`` are filled.
        view: Camera or mirror image.
        quads: Faces that hide what is behind them.
        at: Present end of ``indices``.
        run: Present end of ``runs``.

    Returns:
        The new ends of ``indices`` and ``runs``.
    """
    chunks, out, runs, work = (
        scene.chunks,
        scene.buffers.indices,
        scene.buffers.runs,
        scene.buffers.work,
    )
    positions, triangles, first_triangle, first_vertex, first_chunk, boxes, mesh_boxes = chunks
    local, rows, face = np.empty((len(view.planes), 4)), np.empty((3, 4)), np.empty((5, 4))
    to_local(view.planes, pos, mat, local)
    to_local(view.rows, pos, mat, rows)
    hiding = _hiding_face(quads, pos, mat, mesh_boxes[mesh], face)
    rows32, mirror32, face32 = _float32(rows), _float32(local[4:]), _float32(face)
    start, kind = at, False
    for chunk in range(first_chunk[mesh], first_chunk[mesh + 1]):
        if box_side(local, boxes[chunk]) < 0:
            continue
        base, length = first_vertex[chunk], first_vertex[chunk + 1] - first_vertex[chunk]
        first, count = first_triangle[chunk], first_triangle[chunk + 1] - first_triangle[chunk]
        project(positions, base, length, rows32, view.lens, work)
        if len(mirror32):
            mark_mirror(positions, base, length, mirror32, work.bits)
        cut = any_cut(length, work.bits)
        if cut != kind:
            run = _close_run(start, at, runs, run)
            start, kind = at, cut
        hides = hiding and box_side(face, boxes[chunk]) >= 0
        if hides:
            mark_hidden(positions, base, length, face32, work.hidden)
        gather(triangles, first, count, base, hides, work)
        judge(count, work, view, ROUNDING if cut else EPS)
        at = _append(triangles, first, count, work.kept, out, at)
    return at, _close_run(start, at, runs, run)


@compiled
def _bound(number: np.ndarray, geom: np.ndarray) -> np.float32:
    """Return a geom's radius as mjv_rbound does."""
    if number[mjv.OBJECT_TYPE] == mjv.MODEL_GEOM:
        return geom[mjv.BOUND_RADIUS]
    kind, a, b, c = number[mjv.TYPE], geom[mjv.SIZE], geom[mjv.SIZE + 1], geom[mjv.SIZE + 2]
    if kind == mjv.SPHERE:
        return a
    if kind == mjv.CAPSULE:
        return a + c
    if kind == mjv.CYLINDER:
        return np.sqrt(a * a + c * c)
    if kind == mjv.BOX:
        return np.sqrt(a * a + b * b + c * c)
    return max(a, max(b, c))


@compiled
def sort_transparent(scene: Scene) -> int:
    """Fill which geoms are transparent and their order, nearest first; return how many are."""
    head, order, found = scene.head, scene.buffers.order, 0
    distances = np.zeros(len(scene.numbers), np.float32)
    for i in range(len(scene.numbers)):
        number, geom = scene.numbers[i], scene.values[i]
        pos, mat, _ = mjv.placement(geom)
        plane = number[mjv.TYPE] == mjv.PLANE
        transparent = geom[mjv.ALPHA] < OPAQUE or (plane and is_behind(head, pos, mat))
        scene.buffers.transparent[i] = transparent
        if not transparent:
            continue
        a, b, c = pos[0] - head[0], pos[1] - head[1], pos[2] - head[2]
        distance = np.sqrt(a * a + b * b + c * c) - _bound(number, geom)
        distances[i] = _FAR_AWAY if plane else distance
        at = found
        while at > 0 and distances[order[at - 1]] > distances[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
        found += 1
    return found


@compiled
def _own_box(number: np.ndarray, geom: np.ndarray, mesh_boxes: np.ndarray, box: np.ndarray) -> None:
    """Fill centre and half sizes, (6,), of a geom in its own frame."""
    kind = number[mjv.TYPE]
    if kind == mjv.MESH:
        copy_vector(mesh_boxes[number[mjv.DATA_ID] // 2], box)
        return
    box[:3] = 0.0
    for k in range(3):
        box[3 + k] = geom[mjv.SIZE + k]
    if kind == mjv.PLANE:
        box[5] = 0.0
    elif kind == mjv.CAPSULE:
        box[5] += max(geom[mjv.SIZE], geom[mjv.SIZE + 1])


@compiled
def find_visible(scene: Scene, skip: int, view: View, quads: Quads) -> None:
    """Fill which geoms but ``skip``, and which of their triangles, are to be drawn."""
    local, box, buffers = np.empty((len(view.planes), 4)), np.empty(6), scene.buffers
    at, run = int(np.int64(0)), int(np.int64(0))  # constants would be compiled for apart
    for i in range(len(scene.numbers)):
        number, geom = scene.numbers[i], scene.values[i]
        pos, mat, _ = mjv.placement(geom)
        buffers.first[i], buffers.end[i] = -1, run
        # Blending with alpha 0 leaves what is there; OpenGL clamps negative alpha to it.
        if i == skip or geom[mjv.ALPHA] <= _ZERO:
            continue
        to_local(view.planes, pos, mat, local)
        _own_box(number, geom, scene.chunks[-1], box)
        if box_side(local, box) < 0:
            continue
        if number[mjv.TYPE] != mjv.MESH:
            buffers.first[i], buffers.end[i] = run, run
            continue
        mesh, start = number[mjv.DATA_ID] // 2, run
        at, run = _visible_triangles(mesh, pos, mat, scene, view, quads, at, run)
        if run > start:
            buffers.first[i], buffers.end[i] = start, run
