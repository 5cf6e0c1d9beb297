"""Small rotation and box helpers in the world frame (metres, radians)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim


# Grip-site frame of a gripper that points straight down with the fingers opening along world y.
# Columns are the site's axes: x (the fingers' axis) = world y, z (the approach) = world -z.
GRIPPER_DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])


def rotation_x(angle: float) -> np.ndarray:
    """Return the (3, 3) rotation by ``angle`` about the x axis."""
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])


def rotation_y(angle: float) -> np.ndarray:
    """Return the (3, 3) rotation by ``angle`` about the y axis."""
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def rotation_z(angle: float) -> np.ndarray:
    """Return the (3, 3) rotation by ``angle`` about the z axis."""
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def axis_angle(rotation: np.ndarray) -> np.ndarray:
    """Return the rotation vector (3,) of a rotation matrix, of length in [0, pi]."""
    cosine = np.clip((np.trace(rotation) - 1.0) / 2.0, -1.0, 1.0)
    angle = np.arccos(cosine)
    skew = np.array(
        [
            rotation[2, 1] - rotation[1, 2],
            rotation[0, 2] - rotation[2, 0],
            rotation[1, 0] - rotation[0, 1],
        ]
    )
    sine = np.linalg.norm(skew) / 2.0
    if sine > 1e-6:
        return skew * (angle / (2.0 * sine))
    if cosine > 0.0:
        return np.zeros(3)
    # Half a turn: the axis is the eigenvector of (R + I) / 2 = a a^T; its sign is free.
    outer = (rotation + np.eye(3)) / 2.0
    column = int(np.argmax(np.diag(outer)))
    return np.pi * outer[:, column] / np.sqrt(outer[column, column])


def tilt_of(rotation: np.ndarray) -> np.ndarray:
    """Return the smallest rotation (3, 3) that turns world z into the frame's z axis.

    It is what a body's orientation keeps when its turn about its own axis is taken away. The axis
    must not point straight down.
    """
    x, y, z = rotation[:, 2]
    scale = 1.0 / (1.0 + z)
    xy = -x * y * scale
    return np.array([[1.0 - x * x * scale, xy, x], [xy, 1.0 - y * y * scale, y], [-x, -y, z]])


def wrap_half_turn(angle: float) -> float:
    """Map an angle to [-pi/2, pi/2): a two-finger gripper looks the same after half a turn."""
    return (angle + np.pi / 2.0) % np.pi - np.pi / 2.0


@dataclass(frozen=True)
class Box:
    """Axis-aligned bounds of a body's collision geometry.

    Attributes:
        low, high: (3,) smallest and largest coordinates.
    """

    low: np.ndarray
    high: np.ndarray

    @property
    def center(self) -> np.ndarray:
        """Middle of the box, (3,)."""
        return (self.low + self.high) / 2.0

    @property
    def size(self) -> np.ndarray:
        """Edge lengths, (3,)."""
        return self.high - self.low


def world_box(sim: LiberoSim, body: str) -> Box:
    """Return the world-aligned bounds of a body's collision geometry."""
    corners = sim.collision_corners(body)
    return Box(corners.min(axis=0), corners.max(axis=0))


def top_box(sim: LiberoSim, body: str, depth: float) -> Box:
    """Return the bounds of what reaches within ``depth`` metres of a body's highest point.

    Of a mug that is the rim without the handle, of a pot the knob of its lid.
    """
    corners = sim.collision_corners(body)
    top = corners[corners[:, 2] > corners[:, 2].max() - depth]
    return Box(top.min(axis=0), top.max(axis=0))


def local_corners(sim: LiberoSim, body: str) -> np.ndarray:
    """Return the collision corners (K, 3) in the body's own frame."""
    return (sim.collision_corners(body) - sim.body_pos(body)) @ sim.body_mat(body)


@dataclass(frozen=True)
class BodyPoint:
    """A point fixed to a body, called for its present world position.

    Attributes:
        sim: The simulation.
        body: Body name.
        local: (3,) coordinates in the body's frame.
    """

    sim: LiberoSim
    body: str
    local: np.ndarray

    @classmethod
    def at(cls, sim: LiberoSim, body: str, world: np.ndarray) -> BodyPoint:
        """Fix the point that is now at ``world`` (3,) to the body."""
        return cls(sim, body, sim.body_mat(body).T @ (world - sim.body_pos(body)))

    def __call__(self) -> np.ndarray:
        """Return the point's world position, (3,)."""
        return self.sim.body_pos(self.body) + self.sim.body_mat(self.body) @ self.local
