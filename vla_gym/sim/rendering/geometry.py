"""What cameras see beside colours: depth, geoms, and where the cameras are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.sim.model_io import load_shared
from vla_gym.sim.rendering.mujoco_painter import GeometryPainter
from vla_gym.sim.rendering.renderer import SceneRenderer

if TYPE_CHECKING:
    from vla_gym.suites.protocol import CompiledTask, Simulation


class GeometryRenderer(SceneRenderer):
    """Renders depth and geom ids of simulations of one scene; see :class:`SceneRenderer`."""

    def __init__(self, task_model: CompiledTask, height: int, width: int) -> None:
        """Prepare a renderer; nothing is allocated on the device yet."""
        super().__init__(task_model, height, width, profile="fast")

    def _new_painter(self) -> GeometryPainter:
        return GeometryPainter(self._shared, self.width, self.height)

    def render_geometry(
        self, sim: Simulation, cameras: Sequence[str]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return depth and geom ids as each camera sees them; see ``draw_geometry``.

        Raises:
            RenderError: No usable OpenGL context.
            ConfigError: A camera does not exist.
        """
        with self._drawing(sim, cameras) as (painter, data, views):
            return [painter.draw_geometry(data, view) for view in views]


def camera_matrices(sim: Simulation, camera: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return intrinsics and extrinsics of a camera of the model, as images show it now.

    OpenCV's axes: x to the right, y down, z away from the camera.

    Args:
        sim: The simulation.
        camera: Name in the model.
        size: Height and width of the images in pixels.

    Returns:
        (3, 3) float64, from camera coordinates to pixels; (4, 4) float64, from world to camera
        coordinates in metres.
    """
    shared = load_shared(sim.task_model)
    with shared.lock:
        seen = sim.prepare_render().camera(camera)
        position, axes = seen.xpos.copy(), seen.xmat.reshape(3, 3).copy()
        half_angle = np.deg2rad(float(shared.model.camera(camera).fovy[0])) / 2.0
    focal = size / 2.0 / np.tan(half_angle)
    intrinsics = np.array([[focal, 0.0, size / 2.0], [0.0, focal, size / 2.0], [0.0, 0.0, 1.0]])
    # MuJoCo's camera looks along its -z axis, its y axis is up.
    rotation = (axes * [1.0, -1.0, -1.0]).T
    extrinsics = np.eye(4)
    extrinsics[:3, :3], extrinsics[:3, 3] = rotation, -rotation @ position
    return intrinsics, extrinsics
