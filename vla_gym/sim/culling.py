"""Which geoms, and which triangles of meshes, a camera may see; see :mod:`.triangle_tests`."""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.sim.hiding_faces import Quads
from vla_gym.sim.render_views import View
from vla_gym.sim.triangle_tests import (
    DROP,
    EPS,
    LOOK,
    MARGIN,
    ROUNDING,
    Workspace,
    any_cut,
    gather,
    judge,
    mark_hidden,
    mark_mirror,
    project,
    samples_hit,
)


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
    triangles: np.ndarray,
    first: int,
    count: int,
    view: View,
    work: Workspace,
    out: np.ndarray,
    at: int,
) -> int:
    """Append the vertex numbers of a judged chunk's visible triangles; return the new end."""
    for t in range(count):
        verdict = work.verdict[t]
        if verdict == DROP:
            continue
        if verdict == LOOK and not samples_hit(work.corners, t, view.sign, view.samples):
            continue
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
def visible_triangles(
    mesh: int,
    pos: np.ndarray,
    mat: np.ndarray,
    view: View,
    quads: Quads,
    chunks: tuple[np.ndarray, ...],
    work: Workspace,
    out: np.ndarray,
    at: int,
    runs: np.ndarray,
    run: int,
) -> tuple[int, int]:
    """Append the vertex numbers of a mesh's visible triangles to ``out``, in runs to draw at once.

    Args:
        mesh: Number of the mesh.
        pos: float32 (3,) position of the geom.
        mat: float32 (9,) its rotation.
        view: Camera or mirror image.
        quads: Faces that hide what is behind them.
        chunks: Fields of :class:`vla_gym.sim.mesh_chunks.MeshChunks` from ``positions`` on.
        work: Scratch arrays.
        out: uint32, room for all triangles of all geoms.
        at: Present end of ``out``.
        runs: int64 (R, 2): first entry of ``out`` and number of entries of each run.
        run: Present end of ``runs``.

    Returns:
        The new ends of ``out`` and ``runs``.
    """
    positions, triangles, first_triangle, first_vertex, first_chunk, boxes, mesh_boxes = chunks
    local, rows, face = np.empty((len(view.planes), 4)), np.empty((3, 4)), np.empty((5, 4))
    to_local(view.planes, pos, mat, local)
    to_local(view.rows, pos, mat, rows)
    hiding = _hiding_face(quads, pos, mat, mesh_boxes[mesh], face)
    rows32, mirror32, face32 = _float32(rows), _float32(local[4:]), _float32(face)
    xs, ys, depths, bits = work.pixels[0], work.pixels[1], work.pixels[2], work.bits
    corners, flags, buried = work.corners, work.flags, work.buried
    xy = (corners[0], corners[1], corners[2], corners[3], corners[4], corners[5])
    start, kind = at, False
    for chunk in range(first_chunk[mesh], first_chunk[mesh + 1]):
        if box_side(local, boxes[chunk]) < 0:
            continue
        base, length = first_vertex[chunk], first_vertex[chunk + 1] - first_vertex[chunk]
        first, count = first_triangle[chunk], first_triangle[chunk + 1] - first_triangle[chunk]
        project(positions, base, length, rows32, view.lens, xs, ys, depths, bits)
        if len(mirror32):
            mark_mirror(positions, base, length, mirror32, bits)
        cut = any_cut(length, bits)
        if cut != kind:
            run = _close_run(start, at, runs, run)
            start, kind = at, cut
        hides = hiding and box_side(face, boxes[chunk]) >= 0
        if hides:
            mark_hidden(positions, base, length, face32, work.hidden)
        gather(triangles, first, count, base, hides, work)
        slack = ROUNDING if cut else EPS
        judge(
            count,
            xy,
            flags[0],
            flags[1],
            buried[0],
            buried[1],
            view.sign,
            slack,
            view.samples,
            work.verdict,
        )
        at = _append(triangles, first, count, view, work, out, at)
    return at, _close_run(start, at, runs, run)
