"""What the cameras of an environment see, and where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.envs.checks import check_choice, check_flag
from vla_gym.envs.scene_cache import SceneCache
from vla_gym.errors import ConfigError
from vla_gym.suites.protocol import Simulation, Suite

if TYPE_CHECKING:
    from vla_gym.sim import SceneRenderer


class CameraEnv(gym.Env[dict[str, Any], np.ndarray]):
    """Images, depth, segmentation and camera matrices of an environment.

    :class:`~vla_gym.envs.base.LiberoEnvBase` gives it its arguments and its simulation.
    """

    cameras: tuple[str, ...]
    image_size: int
    depth: bool
    segmentation: bool
    _suite: Suite
    _scenes: SceneCache
    _sim: Simulation | None
    _task_id: int
    _image_shape: tuple[int, int, int]
    _image_out: dict[str, np.ndarray] | None

    @property
    def sim(self) -> Any:
        """The suite's simulation with its privileged state; LIBERO's is a ``LiberoSim``.

        Raises:
            gymnasium.error.ResetNeeded: Before the first reset.
        """
        if self._sim is None:
            raise gym.error.ResetNeeded(
                "There is no simulation before the first reset() or after close(): call reset() "
                "first."
            )
        return self._sim

    def _camera_fields(self) -> dict[str, spaces.Space[Any]]:
        """Return the spaces of what the cameras see, after a check of what is asked for.

        Raises:
            ConfigError: If a camera is named twice, depth or segmentation is no bool, or there is
                no camera for it.
        """
        if len(set(self.cameras)) < len(self.cameras):
            raise ConfigError(
                f"cameras must be different, got {list(self.cameras)!r:.80}: name each once."
            )
        fields: dict[str, spaces.Space[Any]] = {
            camera: spaces.Box(0, 255, self._image_shape, np.uint8) for camera in self.cameras
        }
        shape, most = self._image_shape[:2], np.iinfo(np.int32).max
        for name, low, high, dtype in (
            ("depth", 0.0, np.inf, np.float32),
            ("segmentation", -1, most, np.int32),
        ):
            wanted = getattr(self, name)
            check_flag(wanted, name)
            if wanted and not self.cameras:
                raise ConfigError(
                    f"{name}=True needs a camera, got cameras=(): name one of "
                    f"{list(self._suite.cameras)}, or leave cameras out for all."
                )
            if wanted:
                box: Any = spaces.Box(low, high, shape, dtype)
                fields |= {f"{camera}_{name}": box for camera in self.cameras}
        return fields

    def observe(self) -> dict[str, Any]:
        """Return the observation of this moment, for wrappers that have moved the simulation.

        Its arrays are fresh, but for those of :attr:`image_out`.

        Raises:
            RenderError: No usable OpenGL context.
        """
        observation: dict[str, Any] = {}
        if self.cameras:
            images: Sequence[np.ndarray]
            if self._image_out is not None:
                images = list(self._image_out.values())
            else:
                images = list(np.empty((len(self.cameras), *self._image_shape), np.uint8))
            names = [self._suite.cameras[camera] for camera in self.cameras]
            self._scenes.render(self.sim, images, names)
            observation = dict(zip(self.cameras, images, strict=True))
            if self.depth or self.segmentation:
                pairs = self._scenes.render_geometry(self.sim, names)
                for camera, (depth, geoms) in zip(self.cameras, pairs, strict=True):
                    if self.depth:
                        observation[f"{camera}_depth"] = depth
                    if self.segmentation:
                        observation[f"{camera}_segmentation"] = geoms
        observation["proprio"] = self.sim.proprio()
        observation["task_id"] = np.int64(self._task_id)
        return observation

    @property
    def image_out(self) -> dict[str, np.ndarray] | None:
        """Where the cameras render to: camera -> (image_size, image_size, 3) uint8, or None.

        When set, observations of :meth:`reset`, :meth:`step` and :meth:`set_state` hold these very
        arrays: they belong to the caller, who must not let them be written again while an
        observation that holds them is in use. None (default): each observation has arrays of its
        own.

        Raises:
            ConfigError: On setting, if a camera is missing; when an array that does not fit is
                drawn to.
        """
        return self._image_out

    @image_out.setter
    def image_out(self, arrays: Mapping[str, np.ndarray] | None) -> None:
        if arrays is None:
            self._image_out = None
            return
        if set(arrays) != set(self.cameras):
            raise ConfigError(
                f"image_out must name the cameras {list(self.cameras)}, got {list(arrays)}."
            )
        self._image_out = {camera: arrays[camera] for camera in self.cameras}

    def render(self) -> np.ndarray | None:
        """Return an upright image of the main camera, (S, S, 3) uint8; None without a mode."""
        if self.render_mode is None:
            gym.logger.warn(
                "render() returns None: make the environment with render_mode='rgb_array' for "
                "images, or with render_mode='human' for a window."
            )
            return None
        image = np.empty(self._image_shape, np.uint8)
        self._scenes.render(self.sim, [image], [next(iter(self._suite.cameras.values()))])
        return image

    @property
    def renderer(self) -> SceneRenderer | None:
        """The renderer of the present scene, shared with other environments; None without one."""
        if self._sim is None or not (self.cameras or self.render_mode == "rgb_array"):
            return None
        return self._scenes.renderer(self._sim.task_model)

    def render_facts(self) -> dict[str, str | None]:
        """Return GL renderer and visual profile; each None without cameras."""
        renderer = self.renderer
        if renderer is None:
            return {"gl_renderer": None, "visual_profile": None}
        return {"gl_renderer": renderer.renderer_info(), "visual_profile": renderer.profile}

    def camera_intrinsics(self, camera: str) -> np.ndarray:
        """Return the (3, 3) float64 matrix from camera coordinates to pixels of the images.

        OpenCV's axes: x to the right, y down, z away from the camera. Column c of a picture's row
        r, counted from its upper left corner, covers x from c to c + 1 and y from r to r + 1.

        Args:
            camera: One of the suite's cameras, e.g. ``"agentview"``, observed or not.

        Raises:
            gymnasium.error.ResetNeeded: Before the first reset.
            ConfigError: If there is no such camera.
        """
        return self._camera_matrices(camera)[0]

    def camera_extrinsics(self, camera: str) -> np.ndarray:
        """Return the (4, 4) float64 matrix from world to camera coordinates, in metres.

        It is that of the moment that the observation shows, see ``observation_timing``: the wrist's
        camera moves. Its inverse is the camera's pose. Arguments and errors are those of
        :meth:`camera_intrinsics`.
        """
        return self._camera_matrices(camera)[1]

    def _camera_matrices(self, camera: str) -> tuple[np.ndarray, np.ndarray]:
        from vla_gym.sim.rendering.geometry import camera_matrices

        check_choice(camera, "camera", tuple(self._suite.cameras))
        return camera_matrices(self.sim, self._suite.cameras[camera], self.image_size)

    def geom_bodies(self) -> tuple[str, ...]:
        """Return the name of the body that each geom of the present scene belongs to, by geom id.

        Raises:
            gymnasium.error.ResetNeeded: Before the first reset.
        """
        model = self.sim.data.model
        return tuple(model.body(body).name for body in model.geom_bodyid)
