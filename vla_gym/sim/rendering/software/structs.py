"""What the compiled drawing code works on: OpenGL's resources, working memory and the scene."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vla_gym.sim.rendering.software.mesh_chunks import CHUNK_TRIANGLES


class Resources(NamedTuple):
    """What the OpenGL context holds, from MuJoCo's ``MjrContext``.

    Attributes:
        table: Address of the table of OpenGL functions.
        builtin_lists: First display list of the built-in shapes.
        plane_lists: First display list of the planes.
        material_texture: int32: texture of each material or -1.
        texture_names: int32: OpenGL's name of each texture.
        texture_kinds: int32: mjtTexture of each.
        repeats: float32 (2 x materials,): repetitions of 2D textures.
        uniform: int32: whether a material's texture is scaled by size.
        skybox: OpenGL's name of the skybox or -1.
    """

    table: int
    builtin_lists: int
    plane_lists: int
    material_texture: np.ndarray
    texture_names: np.ndarray
    texture_kinds: np.ndarray
    repeats: np.ndarray
    uniform: np.ndarray
    skybox: int


class Workspace(NamedTuple):
    """Scratch arrays of one chunk: (3 x CHUNK_TRIANGLES) for vertices, else for triangles.

    Attributes:
        pixels: float32 (3, vertices): x, y in pixels and depth.
        bits: uint32 (vertices,), see ``triangle_tests``.
        hidden: float32 (vertices,): distance behind the hiding face, -1 beside it.
        corners: float32 (6, triangles): x and y of the corners.
        flags: uint32 (2, triangles): bits of all corners, bits of any.
        buried: float32 (2, triangles): least distance behind the hiding face, range of depth.
        kept: bool (triangles,): whether it is to be drawn.
    """

    pixels: np.ndarray
    bits: np.ndarray
    hidden: np.ndarray
    corners: np.ndarray
    flags: np.ndarray
    buried: np.ndarray
    kept: np.ndarray


class Buffers(NamedTuple):
    """Working memory of a painter; n is the largest number of geoms, T of triangles.

    Attributes:
        material: float32 (5,) what OpenGL was told last: emission (3), shininess, specular.
        numbers: float32 (16,) arguments that OpenGL reads by address. Not an array of a function's
            own: that may be freed after its last use in compiled code, before the call.
        plane: float64 (4,), the same.
        work: See :class:`Workspace`.
        indices: uint32 (3 T,) vertex numbers of the pass.
        runs: int64 (R, 2): first of ``indices`` and number of those to draw at once.
        first: int64 (n,): a geom's first run, -1: not drawn.
        end: int64 (n,): the end of its runs.
        order: int64 (n,): transparent geoms, nearest first.
        transparent: bool (n,).
    """

    material: np.ndarray
    numbers: np.ndarray
    plane: np.ndarray
    work: Workspace
    indices: np.ndarray
    runs: np.ndarray
    first: np.ndarray
    end: np.ndarray
    order: np.ndarray
    transparent: np.ndarray


class Scene(NamedTuple):
    """What an image is drawn from.

    Attributes:
        numbers: int32 (n, 59) geoms, see ``scene_memory``.
        values: The same memory as float32.
        head: float32 (3,) the camera's position.
        lights: float32 (nlight, 7), see ``scene_memory.light_rows``.
        chunks: Fields of ``MeshChunks`` from ``positions`` on.
        resources: OpenGL's.
        buffers: Working memory.
    """

    numbers: np.ndarray
    values: np.ndarray
    head: np.ndarray
    lights: np.ndarray
    chunks: tuple[np.ndarray, ...]
    resources: Resources
    buffers: Buffers


def make_buffers(geoms: int, triangles: int) -> Buffers:
    """Return working memory for scenes of at most that many geoms and triangles in all of them."""
    corners, most = 3 * CHUNK_TRIANGLES, CHUNK_TRIANGLES
    work = Workspace(
        pixels=np.zeros((3, corners), np.float32),
        bits=np.zeros(corners, np.uint32),
        hidden=np.zeros(corners, np.float32),
        corners=np.zeros((6, most), np.float32),
        flags=np.zeros((2, most), np.uint32),
        buried=np.zeros((2, most), np.float32),
        kept=np.zeros(most, np.bool_),
    )
    return Buffers(
        material=np.full(5, np.nan, np.float32),
        numbers=np.zeros(16, np.float32),
        plane=np.zeros(4),
        work=work,
        indices=np.zeros(3 * max(triangles, 1), np.uint32),
        runs=np.zeros((geoms + triangles // CHUNK_TRIANGLES + 1, 2), np.int64),
        first=np.zeros(geoms, np.int64),
        end=np.zeros(geoms, np.int64),
        order=np.zeros(geoms, np.int64),
        transparent=np.zeros(geoms, np.bool_),
    )
