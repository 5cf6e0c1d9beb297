"""Which triangles need not be drawn because they cannot change a pixel.

A triangle is left out if it

- lies outside the image,
- faces away, so that OpenGL would drop it,
- is smaller than a pixel and contains none of the points at which pixels are sampled (most
  triangles of a detailed mesh that is a few dozen pixels large), or
- lies behind a large opaque face (:class:`vla_gym.sim.rendering.software.hiding_faces.Quads`).

What is left keeps its order. OpenGL rounds the corners of a triangle to a fraction of a pixel and
computes in single precision; so a triangle is only left out if that also holds for every triangle
whose edges are up to :data:`EPS` pixels elsewhere. Triangles that cross the image's border, the
near plane or a mirror's plane are cut there by OpenGL, and are all drawn.

One peculiarity of Mesa remains. Whether a sliver faces away is decided by its rounded corners, but
by its exact ones if any vertex of the same batch is outside of the image. So slivers that face
away by their exact corners are left out in chunks that reach out of the image (Mesa would drop
them), kept in others, and drawn together only with chunks of the same kind.
"""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.sim.rendering.software.structs import Workspace
from vla_gym.sim.rendering.software.view import WIDER, View

# Pixels: more than rounding to 1/256 of a pixel and single precision can move a corner.
EPS = np.float32(0.02)
# What lies at least this far behind a face is hidden by it, in metres, plus its own depth, plus
# more for a sliver: where OpenGL rounds a triangle of height h (pixels) to be e wider, it
# extrapolates its depth by e / h. e is below 0.01 with the usual 8 bits of subpixel precision.
BEHIND = np.float32(0.01)
SLIVER = np.float32(0.05)
# The same where exact corners count: their single precision.
ROUNDING = np.float32(1e-4)
# Bits of a vertex: outside of a side of the frustum (0-3), before the near plane (4), outside of a
# mirror's plane (5) and of its edges (6-9); no reasons to cull: cut off by OpenGL (14), too near
# for the projection (15).
_BORDERS = np.uint32(0x803F)
_OUTSIDE = np.uint32(0x3FFF)
_NONE = np.uint32(0)
_CUT = np.uint32(0x4000)
# Metres: more than single precision can move a point of a scene.
MARGIN = 1e-4
_ONE, _NOTHING = np.float32(1), np.float32(0)


@compiled
def project(
    positions: np.ndarray,
    first: int,
    count: int,
    rows: np.ndarray,
    lens: np.ndarray,
    work: Workspace,
) -> None:
    """Fill pixels, depth and the frustum's bits of ``count`` vertices; ``rows`` float32 (3, 4)."""
    x_out, y_out, depth_out, bits = work.pixels[0], work.pixels[1], work.pixels[2], work.bits
    exact = np.float32(1 / WIDER)
    tan_x, tan_y, focal, centre_x, centre_y, near, guard = lens
    a0, a1, a2, a3 = rows[0]
    b0, b1, b2, b3 = rows[1]
    c0, c1, c2, c3 = rows[2]
    xs, ys, zs = positions[0], positions[1], positions[2]
    for i in range(count):
        x, y, z = xs[first + i], ys[first + i], zs[first + i]
        u = a0 * x + a1 * y + a2 * z + a3
        v = b0 * x + b1 * y + b2 * z + b3
        w = c0 * x + c1 * y + c2 * z + c3
        scale = focal / w
        x_out[i] = centre_x + u * scale
        y_out[i] = centre_y + v * scale
        depth_out[i] = w
        right, top = tan_x * w, tan_y * w
        bits[i] = (
            np.uint32(u > right)
            | (np.uint32(u < -right) << np.uint32(1))
            | (np.uint32(v > top) << np.uint32(2))
            | (np.uint32(v < -top) << np.uint32(3))
            | (np.uint32(w < np.float32(0.99) * near) << np.uint32(4))
            | (np.uint32(max(abs(u) - exact * right, abs(v) - exact * top) > 0) << np.uint32(14))
            | (np.uint32(w < near) << np.uint32(14))
            | (np.uint32(not w >= guard) << np.uint32(15))
        )


@compiled
def mark_mirror(
    positions: np.ndarray, first: int, count: int, planes: np.ndarray, bits: np.ndarray
) -> None:
    """Add the bits of a mirror's planes (5, 4), float32."""
    xs, ys, zs = positions[0], positions[1], positions[2]
    a, b, c, d = planes[0]
    for i in range(count):
        inside = a * xs[first + i] + b * ys[first + i] + c * zs[first + i] + d
        bits[i] |= np.uint32(inside < _NOTHING) << np.uint32(14)
    for k in range(len(planes)):
        a, b, c, d = planes[k]
        for i in range(count):
            inside = a * xs[first + i] + b * ys[first + i] + c * zs[first + i] + d
            bits[i] |= np.uint32(inside < np.float32(-MARGIN)) << np.uint32(5 + k)


@compiled
def mark_hidden(
    positions: np.ndarray, first: int, count: int, planes: np.ndarray, hidden: np.ndarray
) -> None:
    """Fill how far vertices are behind a face with planes (5, 4), float32; -1 beside it."""
    xs, ys, zs = positions[0], positions[1], positions[2]
    a, b, c, d = planes[0]
    for i in range(count):
        hidden[i] = a * xs[first + i] + b * ys[first + i] + c * zs[first + i] + d
    for k in range(1, 5):
        a, b, c, d = planes[k]
        for i in range(count):
            inside = a * xs[first + i] + b * ys[first + i] + c * zs[first + i] + d
            hidden[i] = hidden[i] if inside > np.float32(MARGIN) else -_ONE


@compiled
def gather(
    triangles: np.ndarray, first: int, count: int, base: int, hides: bool, work: Workspace
) -> None:
    """Collect what :func:`judge` needs of each triangle."""
    pixels, bits, hidden = work.pixels, work.bits, work.hidden
    corners, flags, buried = work.corners, work.flags, work.buried
    for t in range(count):
        a = np.int64(triangles[first + t, 0]) - base
        b = np.int64(triangles[first + t, 1]) - base
        c = np.int64(triangles[first + t, 2]) - base
        corners[0, t], corners[1, t] = pixels[0, a], pixels[1, a]
        corners[2, t], corners[3, t] = pixels[0, b], pixels[1, b]
        corners[4, t], corners[5, t] = pixels[0, c], pixels[1, c]
        flags[0, t] = bits[a] & bits[b] & bits[c]
        flags[1, t] = bits[a] | bits[b] | bits[c]
        if hides:
            low = min(pixels[2, a], min(pixels[2, b], pixels[2, c]))
            high = max(pixels[2, a], max(pixels[2, b], pixels[2, c]))
            buried[0, t] = min(hidden[a], min(hidden[b], hidden[c]))
            buried[1, t] = high - low
        else:
            buried[0, t], buried[1, t] = -_ONE, _ONE


@compiled
def judge(count: int, work: Workspace, view: View, slack: np.float32) -> None:
    """Fill whether each triangle is to be drawn.

    One pass without branches, so that it becomes vector code. Samples are tested for triangles
    smaller than a pixel: one candidate for each sample position is enough. ``slack`` is by how much
    a triangle may face away: area / length, pixels.
    """
    corners, every, some = work.corners, work.flags[0], work.flags[1]
    xa, ya, xb, yb, xc, yc = corners[0], corners[1], corners[2], corners[3], corners[4], corners[5]
    buried, depth, kept = work.buried[0], work.buried[1], work.kept
    sign, samples = view.sign, view.samples
    s0, t0, s1, t1 = samples[0, 0], samples[0, 1], samples[1, 0], samples[1, 1]
    s2, t2, s3, t3 = samples[2, 0], samples[2, 1], samples[3, 0], samples[3, 1]
    for i in range(count):
        x0, y0, x1, y1, x2, y2 = xa[i], ya[i], xb[i], yb[i], xc[i], yc[i]
        ax, ay = sign * (x1 - x0), sign * (y1 - y0)
        bx, by = sign * (x2 - x1), sign * (y2 - y1)
        cx, cy = sign * (x0 - x2), sign * (y0 - y2)
        la, lb, lc = abs(ax) + abs(ay), abs(bx) + abs(by), abs(cx) + abs(cy)
        area, length = sign * (bx * cy - by * cx), la + lb + lc
        left, right = min(x0, min(x1, x2)) - EPS, max(x0, max(x1, x2)) + EPS
        low, high = min(y0, min(y1, y2)) - EPS, max(y0, max(y1, y2)) + EPS
        # Inside or at most EPS outside of each edge; rounding may turn around a narrow triangle
        # that faces away by little (area < 0).
        turned = min(area, _NOTHING)
        ea, eb, ec = turned - EPS * la, turned - EPS * lb, turned - EPS * lc
        # The first sample of each kind right of and above the corner of the bounding rectangle.
        x, y = np.ceil(left - s0) + s0, np.ceil(low - t0) + t0
        hit = (x <= right) & (y <= high) & (ax * (y - y0) - ay * (x - x0) >= ea)
        hit &= (bx * (y - y1) - by * (x - x1) >= eb) & (cx * (y - y2) - cy * (x - x2) >= ec)
        x, y = np.ceil(left - s1) + s1, np.ceil(low - t1) + t1
        other = (x <= right) & (y <= high) & (ax * (y - y0) - ay * (x - x0) >= ea)
        other &= (bx * (y - y1) - by * (x - x1) >= eb) & (cx * (y - y2) - cy * (x - x2) >= ec)
        hit |= other
        x, y = np.ceil(left - s2) + s2, np.ceil(low - t2) + t2
        other = (x <= right) & (y <= high) & (ax * (y - y0) - ay * (x - x0) >= ea)
        other &= (bx * (y - y1) - by * (x - x1) >= eb) & (cx * (y - y2) - cy * (x - x2) >= ec)
        hit |= other
        x, y = np.ceil(left - s3) + s3, np.ceil(low - t3) + t3
        other = (x <= right) & (y <= high) & (ax * (y - y0) - ay * (x - x0) >= ea)
        other &= (bx * (y - y1) - by * (x - x1) >= eb) & (cx * (y - y2) - cy * (x - x2) >= ec)
        hit |= other
        large = (right - left >= _ONE) | (high - low >= _ONE)
        crossing = (some[i] & _BORDERS) != _NONE
        front = area >= -slack * (length + np.float32(8) * slack)
        covered = (buried[i] - BEHIND) * area > depth[i] * (area + SLIVER * length)
        covered &= area > _NOTHING
        seen = ((every[i] & _OUTSIDE) == _NONE) & (crossing | (front & (not covered)))
        kept[i] = seen & (crossing | large | hit)


@compiled
def any_cut(count: int, bits: np.ndarray) -> bool:
    """Tell whether OpenGL cuts off a vertex."""
    some = _NONE
    for i in range(count):
        some |= bits[i]
    return bool((some & _CUT) != _NONE)
