"""Where objects and fixtures start: LIBERO's placement rules on our own random generator.

Upstream draws from NumPy's global state while it rebuilds the environment; here the same rules
(upstream files ``regions/base_region_sampler.py``, ``regions/workspace_region_sampler.py`` and
``envs/bddl_base_domain.py``) run on data alone, from a generator that the caller owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_gym.errors import CompileError

# Upstream gives up on an object after this many draws; its caller then starts the layout again.
MAX_TRIES = 5000
MAX_RESTARTS = 100

_AXES = {"x": 0, "y": 1, "z": 2}


@dataclass(frozen=True, eq=False)
class Placement:
    """How one object or fixture is placed on the table.

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
    """

    name: str
    is_fixture: bool
    x_ranges: np.ndarray
    y_ranges: np.ndarray
    reference_pos: np.ndarray
    z_offset: float
    rotation: Any
    rotation_axis: str | None
    scalar_last: bool
    keep_inside: bool
    avoid_overlap: bool
    radius: float
    bottom: float
    top: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        """Build a placement from the dictionary that the compile process wrote."""
        arrays = {k: np.asarray(data[k], dtype=np.float64) for k in _ARRAY_FIELDS}
        return cls(**{**data, **arrays})

    def height(self) -> float:
        """Return the z of the root body in metres."""
        return float((self.z_offset + self.reference_pos[2]) - self.bottom)

    def draw_position(self, rng: np.random.Generator) -> np.ndarray:
        """Draw one candidate position, (3,), without looking at other objects."""
        region = int(rng.integers(len(self.x_ranges)))
        xy = [
            _uniform(rng, *self._bounds(ranges[region])) + self.reference_pos[axis]
            for axis, ranges in enumerate((self.x_ranges, self.y_ranges))
        ]
        return np.array([xy[0], xy[1], self.height()])

    def draw_rotation(self, rng: np.random.Generator) -> np.ndarray:
        """Draw the orientation as MuJoCo reads it, (4,)."""
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
        position[2] = self.height()
        angle = 0.0
        if self.rotation is not None and not isinstance(self.rotation, Mapping):
            angle = float(sum(self.rotation)) / 2
        return position, _axis_quat(self.rotation_axis or "z", angle, self.scalar_last)

    def _bounds(self, region: np.ndarray) -> tuple[float, float]:
        margin = self.radius if self.keep_inside else 0.0
        return float(region[0]) + margin, float(region[1]) - margin


_ARRAY_FIELDS = ("x_ranges", "y_ranges", "reference_pos")


def sample_poses(
    placements: Sequence[Placement], rng: np.random.Generator
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Place all objects one after the other, as upstream does.

    Args:
        placements: In upstream's order; later ones avoid earlier ones.
        rng: Source of all randomness.

    Returns:
        Instance name to position (3,) and orientation (4,) as MuJoCo reads it.

    Raises:
        CompileError: If no valid layout was found in 100 complete attempts.
    """
    for _ in range(MAX_RESTARTS):
        poses = _try_poses(placements, rng)
        if poses is not None:
            return poses
    names = ", ".join(p.name for p in placements)
    raise CompileError(
        f"No valid layout of {names} was found in {MAX_RESTARTS} attempts: "
        "the regions of the BDDL file are too small for its objects."
    )


def _try_poses(
    placements: Sequence[Placement], rng: np.random.Generator
) -> dict[str, tuple[np.ndarray, np.ndarray]] | None:
    poses: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    placed: list[tuple[np.ndarray, Placement]] = []
    for placement in placements:
        for _ in range(MAX_TRIES):
            position = placement.draw_position(rng)
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


def _multiply_scalar_last(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the Hamilton product of two (x, y, z, w) quaternions."""
    vector = left[3] * right[:3] + right[3] * left[:3] + np.cross(left[:3], right[:3])
    return np.append(vector, left[3] * right[3] - left[:3] @ right[:3])
