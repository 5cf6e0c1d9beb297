"""Meshes as short runs of triangles that can be tested and drawn one by one.

MuJoCo draws a mesh as a whole. Here each mesh is cut into chunks of consecutive triangles, each
with its own vertices (equal ones stored once) and bounding box. Order and orientation of the
triangles are kept: where two surfaces have the same depth, the later one wins.
"""

from __future__ import annotations

from typing import NamedTuple

import mujoco
import numpy as np

from vla_gym.sim.model_io import SharedModel
from vla_gym.sim.rendering.software.coarse_meshes import merge_corners

# Mesa's software vertex pipeline takes triangles in batches of this many, each with its own way
# through clipping (see culling.py).
CHUNK_TRIANGLES = 341
# MuJoCo replaces a vertex normal that deviates from the face's by the face's, unless the mesh has
# texture coordinates: cosine of the angle (mjr_uploadMesh).
_SMOOTH_COSINE = 0.8


class MeshChunks(NamedTuple):
    """The triangles of all meshes of a model; V vertices, T triangles, C chunks, M meshes.

    Attributes:
        vertices: float32 (V, 8): position, normal, texture coordinates, as MuJoCo draws them.
        positions: float32 (3, V), the same positions by coordinate.
        triangles: uint32 (T, 3) vertex numbers.
        first_triangle: int64 (C + 1,).
        first_vertex: int64 (C + 1,).
        first_chunk: int64 (M + 1,).
        boxes: float64 (C, 6): centre and half sizes of each chunk.
        mesh_boxes: float64 (M, 6): the same for each mesh.
    """

    vertices: np.ndarray
    positions: np.ndarray
    triangles: np.ndarray
    first_triangle: np.ndarray
    first_vertex: np.ndarray
    first_chunk: np.ndarray
    boxes: np.ndarray
    mesh_boxes: np.ndarray


def mesh_chunks(shared: SharedModel, *, coarse: bool = False) -> MeshChunks:
    """Return the chunks of a model; made once a process, by the first that asks.

    Args:
        shared: The model.
        coarse: Whether meshes of many triangles have fewer, see ``coarse_meshes``.
    """
    name = "coarse_mesh_chunks" if coarse else "mesh_chunks"
    return shared.once(name, lambda: cut_meshes(shared.model, coarse))


def cut_meshes(model: mujoco.MjModel, coarse: bool) -> MeshChunks:
    """Cut all meshes of a model into chunks."""
    meshes = [_corners(model, mesh) for mesh in range(model.nmesh)]
    if coarse:
        meshes = [merge_corners(corners) for corners in meshes]
    sizes = np.array([len(corners) for corners in meshes], np.int64)
    first_chunk = np.zeros(model.nmesh + 1, np.int64)
    first_chunk[1:] = np.cumsum(-(-sizes // CHUNK_TRIANGLES))
    count = int(first_chunk[-1])
    first_triangle, first_vertex = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    boxes, mesh_boxes = np.zeros((count, 6)), np.zeros((model.nmesh, 6))
    triangles = np.zeros((int(sizes.sum()), 3), np.uint32)
    vertices = np.zeros((3 * len(triangles), 8), np.float32)
    for mesh, corners in enumerate(meshes):
        at = int(first_triangle[first_chunk[mesh]])
        for k in range(-(-len(corners) // CHUNK_TRIANGLES)):
            chunk = int(first_chunk[mesh]) + k
            part = corners[k * CHUNK_TRIANGLES : (k + 1) * CHUNK_TRIANGLES]
            used = int(first_vertex[chunk])
            different, numbers = _different(part.reshape(-1, 8))
            first_vertex[chunk + 1] = used + len(different)
            vertices[used : used + len(different)] = different
            triangles[at : at + len(part)] = used + numbers.reshape(-1, 3)
            at += len(part)
            first_triangle[chunk + 1] = at
            boxes[chunk] = _box(part)
        if len(corners):
            mesh_boxes[mesh] = _box(corners)
    vertices = vertices[: int(first_vertex[-1])].copy()
    return MeshChunks(
        vertices,
        np.ascontiguousarray(vertices[:, :3].T),
        triangles,
        first_triangle,
        first_vertex,
        first_chunk,
        boxes,
        mesh_boxes,
    )


def _corners(model: mujoco.MjModel, mesh: int) -> np.ndarray:
    """Return float32 (F, 3, 8): what MuJoCo passes to OpenGL for each corner of a mesh."""
    faces = slice(
        model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + int(model.mesh_facenum[mesh])
    )
    corners = np.zeros((int(model.mesh_facenum[mesh]), 3, 8), np.float32)
    position = model.mesh_vert[model.mesh_vertadr[mesh] + model.mesh_face[faces]]
    normal = model.mesh_normal[model.mesh_normaladr[mesh] + model.mesh_facenormal[faces]]
    corners[:, :, :3], corners[:, :, 3:6] = position, normal
    if model.mesh_texcoordadr[mesh] >= 0:
        number = model.mesh_texcoordadr[mesh] + model.mesh_facetexcoord[faces]
        corners[:, :, 6:] = model.mesh_texcoord[number]
        return corners
    flat = _face_normals(position)[:, None, :]
    # Single precision, in this order of additions, as in C.
    product = normal * flat
    cosine = product[:, :, 0] + product[:, :, 1] + product[:, :, 2]
    sharp = cosine.astype(np.float64) < _SMOOTH_COSINE
    corners[:, :, 3:6] = np.where(sharp[:, :, None], flat, normal)
    return corners


def _face_normals(corners: np.ndarray) -> np.ndarray:
    """Return (F, 3) unit normals of float32 (F, 3, 3) triangles, rounded as mjr_makeNormal does."""
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    normal = np.stack(
        [
            a[:, 1] * b[:, 2] - a[:, 2] * b[:, 1],
            a[:, 2] * b[:, 0] - a[:, 0] * b[:, 2],
            a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0],
        ],
        axis=1,
    )
    square = normal * normal
    length = np.sqrt(square[:, 0] + square[:, 1] + square[:, 2])
    tiny = length < np.float32(1e-10)
    scaled = normal * (np.float32(1) / np.where(tiny, np.float32(1), length))[:, None]
    return np.where(tiny[:, None], np.array([0, 0, 1], np.float32), scaled)


def _box(corners: np.ndarray) -> np.ndarray:
    """Return centre and half sizes, (6,), of the box around corners (..., 8)."""
    points = corners[..., :3].reshape(-1, 3).astype(np.float64)
    low, high = points.min(axis=0), points.max(axis=0)
    return np.concatenate([(low + high) / 2, (high - low) / 2])


def _different(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different corners (D, 8) in the order of their first use; and each one's number.

    Corners, float32 (N, 8), are the same when all their bits are.
    """
    keys = corners.view("V32")[:, 0]
    _, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return corners[first[order]], np.argsort(order)[numbers]
