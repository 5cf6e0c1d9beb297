"""Where objects and fixtures start: LIBERO's placement rules on our own random generator.

Upstream draws from NumPy's global state while it rebuilds the environment; here the same rules
(upstream files ``regions/base_region_sampler.py``, ``regions/workspace_region_sampler.py`` and
``envs/bddl_base_domain.py``) run on data alone, from a generator that the caller owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_gym.errors import CompileError

# Upstream gives up on an object after this many draws; its caller then starts the layout again.
MAX_TRIES = 5000
MAX_RESTARTS = 100

_AXES = {"x": 0, "y": 1, "z": 2}

Axis = Literal["x", "y", "z"]
# Position (3,) and orientation (4,) as MuJoCo reads it.
Pose = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Placement:
    """How one object or fixture is placed: on the table, or on or in something placed before.

    Attributes:
        name: BDDL instance name.
        is_fixture: Whether the pose goes into the model instead of qpos.
        x_ranges, y_ranges: (R, 2) regions relative to ``reference_pos``; one is drawn per try.
        reference_pos: (3,) centre of the table top in metres.
        z_offset: Height over it in metres.
        rotation: None for a uniform turn, ``[low, high]``, or ``{axis: [low, high]}`` for several
            turns one after the other, in radians.
        rotation_axis: ``x``, ``y`` or ``z``; unused with several turns.
        scalar_last: Upstream's table sampler builds (x, y, z, w) quaternions but MuJoCo reads them
            as (w, x, y, z); kept, since objects must face as in upstream's data.
        keep_inside: Shrink the region by the radius on each side. Where the radius is larger than
            the region, this turns the bounds around, and upstream draws between them all the same.
        avoid_overlap: Reject positions that overlap what was placed before.
        radius: Horizontal radius in metres.
        bottom, top: z of the object's bottom and top relative to its root body, in metres.
        reference: Instance whose pose, drawn before, takes the place of ``reference_pos``; or None.
        lift: Height added to the reference in metres: its top, unless the object goes inside.
        site_pos: (3,) position of the site, turned with the reference and added to its position;
            upstream takes the site's position before it moves the reference there.
        slides: qpos addresses of the joints that the site moves with (a drawer's), and the
            direction of each, (3,).
        init_quat: Turn of the object itself, applied first; or None.
    """

    name: str
    is_fixture: bool
    x_ranges: np.ndarray
    y_ranges: np.ndarray
    reference_pos: np.ndarray
    z_offset: float
    rotation: tuple[float, float] | dict[Axis, tuple[float, float]] | None
    rotation_axis: Axis | None
    scalar_last: bool
    keep_inside: bool
    avoid_overlap: bool
    radius: float
    bottom: float
    top: float
    reference: str | None = None
    lift: float = 0.0
    site_pos: np.ndarray | None = None
    slides: tuple[tuple[int, np.ndarray], ...] = ()
    init_quat: np.ndarray | None = None

    def origin(self, poses: Mapping[str, Pose], qpos: np.ndarray) -> np.ndarray:
        """Return what the regions are relative to, (3,).

        Args:
            poses: What was placed before.
            qpos: (nq,) positions; drawers stand where the episode begins.
        """
        if self.reference is None:
            return self.reference_pos
        position, quat = poses[self.reference]
        origin = position + np.array([0.0, 0.0, self.lift])
        if self.site_pos is None:
            return origin
        site = self.site_pos + sum((qpos[a] * axis for a, axis in self.slides), np.zeros(3))
        return origin + _rotated(quat, site)

    def draw_position(self, rng: np.random.Generator, origin: np.ndarray) -> np.ndarray:
        """Draw one candidate position, (3,), without looking at other objects."""
        region = int(rng.integers(len(self.x_ranges)))
        xy = [
            _uniform(rng, *self._bounds(ranges[region])) + origin[axis]
            for axis, ranges in enumerate((self.x_ranges, self.y_ranges))
        ]
        return np.array([xy[0], xy[1], self._height(origin)])

    def draw_rotation(self, rng: np.random.Generator) -> np.ndarray:
        """Draw the orientation as MuJoCo reads it, (4,)."""
        quat = self._draw_turn(rng)
        # Upstream multiplies as if both were (x, y, z, w), whatever they are.
        return quat if self.init_quat is None else _multiply_scalar_last(quat, self.init_quat)

    def _draw_turn(self, rng: np.random.Generator) -> np.ndarray:
        if isinstance(self.rotation, Mapping):
            quat = np.array([0.0, 0.0, 0.0, 1.0])
            for axis, (low, high) in self.rotation.items():
                turn = _axis_quat(axis, _uniform(rng, low, high), scalar_last=True)
                quat = _multiply_scalar_last(turn, quat)
            return quat
        low, high = (0.0, 2 * np.pi) if self.rotation is None else self.rotation
        return _axis_quat(self.rotation_axis, _uniform(rng, low, high), self.scalar_last)

    def nominal_pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the middle of the first region and of the rotation range."""
        low_x, high_x = self._bounds(self.x_ranges[0])
        low_y, high_y = self._bounds(self.y_ranges[0])
        position = np.array([(low_x + high_x) / 2, (low_y + high_y) / 2, 0.0]) + self.reference_pos
        position[2] = self._height(self.reference_pos)
        angle = 0.0
        if self.rotation is not None and not isinstance(self.rotation, Mapping):
            angle = float(sum(self.rotation)) / 2
        return position, _axis_quat(self.rotation_axis or "z", angle, self.scalar_last)

    def _height(self, origin: np.ndarray) -> float:
        return float((self.z_offset + origin[2]) - self.bottom)

    def _bounds(self, region: np.ndarray) -> tuple[float, float]:
        margin = self.radius if self.keep_inside else 0.0
        return float(region[0]) + margin, float(region[1]) - margin


def sample_poses(
    placements: Sequence[Placement], rng: np.random.Generator, qpos: np.ndarray
) -> dict[str, Pose]:
    """Place all objects one after the other, as upstream does.

    Args:
        placements: In upstream's order; later ones avoid earlier ones.
        rng: Source of all randomness.
        qpos: (nq,) positions that the episode begins with; only joints of fixtures count.

    Returns:
        Instance name to position (3,) and orientation (4,) as MuJoCo reads it.

    Raises:
        CompileError: If no valid layout was found in 100 complete attempts.
    """
    for _ in range(MAX_RESTARTS):
        poses = _try_poses(placements, rng, qpos)
        if poses is not None:
            return poses
    names = ", ".join(p.name for p in placements)
    raise CompileError(
        f"No valid layout of {names} was found in {MAX_RESTARTS} attempts: "
        "the regions of the BDDL file are too small for its objects."
    )


def _try_poses(
    placements: Sequence[Placement], rng: np.random.Generator, qpos: np.ndarray
) -> dict[str, Pose] | None:
    poses: dict[str, Pose] = {}
    placed: list[tuple[np.ndarray, Placement]] = []
    for placement in placements:
        origin = placement.origin(poses, qpos)
        for _ in range(MAX_TRIES):
            position = placement.draw_position(rng, origin)
            if not (placement.avoid_overlap and _overlaps(placement, position, placed)):
                break
        else:
            return None
        poses[placement.name] = (position, placement.draw_rotation(rng))
        placed.append((position, placement))
    return poses


def _overlaps(
    placement: Placement, position: np.ndarray, placed: Sequence[tuple[np.ndarray, Placement]]
) -> bool:
    for other_position, other in placed:
        distance = np.linalg.norm(position[:2] - other_position[:2])
        side_by_side = position[2] - other_position[2] <= other.top - placement.bottom
        if distance <= other.radius + placement.radius and side_by_side:
            return True
    return False


def _uniform(rng: np.random.Generator, low: float, high: float) -> float:
    # Generator.uniform refuses low > high, which upstream's shrunken regions often have.
    return low + (high - low) * rng.random()


def _axis_quat(axis: str | None, angle: float, scalar_last: bool) -> np.ndarray:
    if axis not in _AXES:
        raise CompileError(f"Unknown rotation axis {axis!r}: expected x, y or z.")
    quat = np.zeros(4)
    quat[3 if scalar_last else 0] = np.cos(angle / 2)
    quat[_AXES[axis] + (0 if scalar_last else 1)] = np.sin(angle / 2)
    return quat


def _rotated(quat: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Turn a vector by a (w, x, y, z) quaternion of any length, as upstream's ``quat2mat``."""
    w, xyz = quat[0], quat[1:]
    squared = float(quat @ quat)
    cross = np.cross(xyz, vector)
    turned: np.ndarray = vector + 2.0 / squared * (w * cross + np.cross(xyz, cross))
    return turned


def _multiply_scalar_last(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the Hamilton product of two (x, y, z, w) quaternions."""
    vector = left[3] * right[:3] + right[3] * left[:3] + np.cross(left[:3], right[:3])
    return np.append(vector, left[3] * right[3] - left[:3] @ right[:3])
