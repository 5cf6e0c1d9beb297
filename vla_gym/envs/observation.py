"""What an environment shows: its observation space, images and proprioception."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from vla_gym.errors import ConfigError

if TYPE_CHECKING:
    from vla_gym.envs.scene_cache import SceneCache
    from vla_gym.suites.protocol import Simulation, Suite


class Observer:
    """Makes observations of a simulation.

    Attributes:
        space: Their space.
    """

    def __init__(
        self, suite: Suite, cameras: Sequence[str], image_size: int, scenes: SceneCache
    ) -> None:
        """Build the space.

        Args:
            suite: The suite.
            cameras: Which of its cameras are observed.
            image_size: Height and width in pixels.
            scenes: Where renderers come from.
        """
        self._cameras, self._scenes = tuple(cameras), scenes
        self._names = tuple(suite.cameras[camera] for camera in cameras)
        self._main = next(iter(suite.cameras.values()))
        self._shape = (image_size, image_size, 3)
        self._image_out: dict[str, np.ndarray] | None = None
        fields: dict[str, spaces.Space[Any]] = {
            camera: spaces.Box(0, 255, self._shape, np.uint8) for camera in self._cameras
        }
        fields["proprio"] = spaces.Box(-np.inf, np.inf, (suite.proprio.size,), np.float32)
        fields["task_id"] = spaces.Discrete(len(suite.tasks))
        self.space = spaces.Dict(fields)

    def observe(self, sim: Simulation, task_id: int) -> dict[str, Any]:
        """Return the observation; its arrays are fresh, but for those of :attr:`image_out`.

        Args:
            sim: The simulation.
            task_id: Index in the suite of the task that it plays.

        Raises:
            RenderError: No usable OpenGL context.
        """
        observation: dict[str, Any] = {}
        if self._cameras:
            images: Sequence[np.ndarray]
            if self._image_out is not None:
                images = list(self._image_out.values())
            else:
                images = list(np.empty((len(self._cameras), *self._shape), np.uint8))
            self._scenes.render(sim, images, self._names)
            observation = dict(zip(self._cameras, images, strict=True))
        observation["proprio"] = sim.proprio()
        observation["task_id"] = np.int64(task_id)
        return observation

    def frame(self, sim: Simulation) -> np.ndarray:
        """Return an upright image of the main camera, (image_size, image_size, 3) uint8."""
        image = np.empty(self._shape, np.uint8)
        self._scenes.render(sim, [image], (self._main,))
        return image

    @property
    def image_out(self) -> dict[str, np.ndarray] | None:
        """Arrays to render into; see ``LiberoEnv.image_out``."""
        return self._image_out

    @image_out.setter
    def image_out(self, arrays: Mapping[str, np.ndarray] | None) -> None:
        if arrays is None:
            self._image_out = None
            return
        if set(arrays) != set(self._cameras):
            raise ConfigError(
                f"image_out must name the cameras {list(self._cameras)}, got {list(arrays)}."
            )
        for camera, array in arrays.items():
            shape, dtype = np.shape(array), getattr(array, "dtype", None)
            if shape != self._shape or dtype != np.uint8 or not array.flags.writeable:
                raise ConfigError(
                    f"image_out[{camera!r}] must be a writeable uint8 array {self._shape}, got "
                    f"{dtype} {shape}."
                )
        self._image_out = {camera: arrays[camera] for camera in self._cameras}
