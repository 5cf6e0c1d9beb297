"""Films episodes: a frame at the reset and one a control step, beside what the policy observes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.play.video import Status, TileFrames, TilePainter


class Camera:
    """Takes a tile's frames: one at the reset and one a control step.

    Frames come from renderers of its own: what the policy observes is untouched.

    Attributes:
        frames: Frames of the present tile.
        limit: Its step limit.
    """

    def __init__(
        self,
        painter: TilePainter,
        cameras: Sequence[str],
        size: int,
        on_step: Callable[[], Any] = lambda: None,
    ) -> None:
        """Prepare; nothing is rendered yet.

        Args:
            painter: Draws the tiles.
            cameras: ``"agentview"``, ``"wrist"`` or both.
            size: Height and width of an image in pixels.
            on_step: Called after every frame but the first.
        """
        from vla_gym.envs.scene_cache import SceneCache

        self._painter, self._cameras, self._size = painter, tuple(cameras), size
        self._on_step = on_step
        # The physics is not used: this cache only keeps renderers, a few scenes at a time.
        self._scenes = SceneCache(
            physics="fast", image_size=size, visual_profile=None, max_scenes=2
        )
        self.frames, self.limit, self._label = TileFrames(), 1, ""

    def begin(self, label: str) -> None:
        """Begin a tile."""
        self.frames, self._label = TileFrames(), label

    def take(self, env: Any, info: dict[str, Any], *, over: bool) -> None:
        """Add a frame of a ``LiberoEnv`` in its present state."""
        from vla_gym.suites import get_suite

        task = env.task_model.task
        self.limit = env.max_control_steps or task.max_control_steps
        images = np.empty((len(self._cameras), self._size, self._size, 3), np.uint8)
        self._scenes.render(
            env.sim, images, [get_suite(task.suite).cameras[name] for name in self._cameras]
        )
        success = bool(info["success"])
        status = Status(
            self._label, int(info["elapsed_steps"]), self.limit, success, over or success
        )
        self.frames.append(self._painter.draw(list(images), task.instruction, status))
        if status.step:
            self._on_step()

    def close(self) -> None:
        """Free the renderers."""
        self._scenes.close()


class Filmed(gym.Wrapper[Any, np.ndarray, Any, np.ndarray]):
    """Directly around a ``LiberoEnv``, below ``ActionChunk``: films every control step."""

    def __init__(self, env: gym.Env[Any, np.ndarray], camera: Camera) -> None:
        super().__init__(env)
        self._camera = camera

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and film the state."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._camera.take(self.unwrapped, info, over=False)
        return obs, info

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and film the state."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._camera.take(self.unwrapped, info, over=terminated or truncated)
        return obs, reward, terminated, truncated, info
