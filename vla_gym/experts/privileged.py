"""What an expert may ask of the simulation: poses of bodies and sites, joints, collision boxes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vla_gym.suites.libero.tasks import LiberoTask


class HasTask(Protocol):
    """Anything that says which task it is, such as a ``TaskModel``."""

    @property
    def task(self) -> LiberoTask:
        """The task that is being solved."""
        ...


class PrivilegedSim(Protocol):
    """The part of ``LiberoSim`` that the experts use; everything is in the world frame, metres.

    A protocol rather than the class itself, so that experts can be tested without a simulator.
    """

    @property
    def task_model(self) -> HasTask:
        """The compiled task that the simulation runs."""
        ...

    def eef_pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Return position (3,) and rotation matrix (3, 3) of the grip site."""
        ...

    def body_pos(self, name: str) -> np.ndarray:
        """Return the position (3,) of a body's frame."""
        ...

    def body_mat(self, name: str) -> np.ndarray:
        """Return the rotation matrix (3, 3) of a body's frame."""
        ...

    def site_pos(self, name: str) -> np.ndarray:
        """Return the position (3,) of a site."""
        ...

    def joint_qpos(self, name: str) -> float:
        """Return the position of a hinge (rad) or slide (m) joint."""
        ...

    def collision_corners(self, body: str) -> np.ndarray:
        """Return the corners (K, 3) of the boxes around all collision geoms of a body."""
        ...

    def success(self) -> bool:
        """Return whether the task's goal is reached."""
        ...
