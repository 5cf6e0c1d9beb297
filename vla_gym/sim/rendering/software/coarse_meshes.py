"""Meshes with fewer triangles, for the profile ``coarse``: vertex clustering.

After Rossignac and Borrel, Multi-resolution 3D approximations for rendering complex scenes (1993).
LIBERO's meshes have up to 70,000 triangles for things that are a few dozen pixels large.
"""

from __future__ import annotations

import numpy as np

#: Edge of a cell in metres: about a pixel of LIBERO's agentview at 128x128.
CELL = 0.008
# Meshes of fewer triangles stay as they are: the gripper's fingers, handles, knobs.
_SMALL = 1000
# Corners of one cell keep looks of their own where their texture coordinates are as far apart as
# this part of the texture: on both sides of a seam.
_TEXTURE_CELLS, _MOST_CELLS = 16, 1 << 10


def merge_corners(corners: np.ndarray) -> np.ndarray:
    """Return the triangles of a mesh that are left when each cell of a grid has one vertex.

    Corners in one cell move to their mean position, so that neighbours stay neighbours; on the 40
    large meshes of goal, spatial and object by 1.5 to 3.1 mm in the mean, by 9.1 at most. Those
    whose normals and texture coordinates are close as well take the mean of these. Triangles that
    shrink to a line are left out, and those whose corners are where an earlier one's are.

    Args:
        corners: float32 (F, 3, 8): position in metres, normal, texture coordinates.

    Returns:
        float32 (F', 3, 8) in the same order, F' <= F; ``corners`` itself if it has few triangles
        or is smaller than a cell.
    """
    if len(corners) < _SMALL:
        return corners
    flat = corners.reshape(-1, 8).astype(np.float64)
    cells = np.floor((flat[:, :3] - flat[:, :3].min(axis=0)) / CELL).astype(np.int64)
    sizes = cells.max(axis=0) + 1
    place = _number((cells[:, 0] * sizes[1] + cells[:, 1]) * sizes[2] + cells[:, 2])
    position = _means(place, flat[:, :3])
    code = place
    for value in np.round(flat[:, 3:6]).astype(np.int64).T:
        code = 3 * code + value + 1
    for value in np.floor(_TEXTURE_CELLS * flat[:, 6:]).astype(np.int64).T:
        code = _MOST_CELLS * code + value % _MOST_CELLS
    look = _number(code)
    looks = _means(look, flat[:, 3:])
    length = np.linalg.norm(looks[:, :3], axis=1, keepdims=True)
    looks[:, :3] /= np.maximum(length, 1e-9)
    merged = np.concatenate([position[place], looks[look]], axis=1).reshape(-1, 3, 8)
    left = merged[_left(place.reshape(-1, 3))].astype(np.float32)
    return left if len(left) else corners


def _number(keys: np.ndarray) -> np.ndarray:
    """Return int64 (N,): a number for each key, the same for equal keys, without gaps."""
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def _means(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean of the rows of each group, (number of groups, columns)."""
    sums = [np.bincount(group, column) for column in values.T]
    return np.stack(sums, axis=1) / np.bincount(group)[:, None]


def _left(triangles: np.ndarray) -> np.ndarray:
    """Return int64 (F',): the triangles (F, 3) with three vertices, each once, in their order."""
    a, b, c = triangles.T
    whole = np.flatnonzero((a != b) & (b != c) & (c != a))
    first = np.argmin(triangles[whole], axis=1)[:, None]
    a, b, c = np.take_along_axis(triangles[whole], (first + np.arange(3)) % 3, axis=1).T
    count = np.int64(triangles.max()) + 1
    return whole[np.sort(np.unique((a * count + b) * count + c, return_index=True)[1])]
