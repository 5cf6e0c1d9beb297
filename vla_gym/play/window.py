"""``render_mode="human"``: both cameras, instruction, step and outcome in a window."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.errors import RenderError
from vla_gym.play.video import FPS, Status, draw_tile
from vla_gym.suites import get_suite

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

logger = logging.getLogger(__name__)

CAMERA_SIZE = 384  # pixels a side


def has_display() -> bool:
    """Tell whether this process can expect to open a window."""
    if not sys.platform.startswith("linux") or "SDL_VIDEODRIVER" in os.environ:
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def check_driver(name: str) -> bool:
    """Tell whether a driver of SDL's shows what it draws, or was asked for by name."""
    return name not in ("dummy", "offscreen") or "SDL_VIDEODRIVER" in os.environ


def check_display() -> None:
    """Check that there is a display.

    Raises:
        RenderError: If there is none.
    """
    if not has_display():
        raise RenderError(
            "render_mode='human' needs a display, and neither DISPLAY nor WAYLAND_DISPLAY is set: "
            "use render_mode='rgb_array', record a video with 'vla-gym play', connect with "
            "'ssh -X', or run under 'xvfb-run -a'."
        )


class HumanView:
    """Shows an environment's episodes in a pygame window, at most 20 control steps a second.

    Closing the window by hand only ends the showing.
    """

    def __init__(self) -> None:
        """Check that there is a display; the window opens with the first frame.

        Raises:
            RenderError: If there is none.
        """
        from vla_gym.envs.scene_cache import SceneCache

        check_display()
        # Renderers of its own: what the environment observes is untouched.
        self._scenes = SceneCache(
            physics="fast", image_size=CAMERA_SIZE, visual_profile=None, max_scenes=1
        )
        self._window: Any = None
        self._is_closed = False
        self._shown = (0, 0.0)

    @property
    def closed(self) -> bool:
        """Whether the window was closed by hand."""
        return self._is_closed

    def show(self, sim: LiberoSim, status: Status) -> None:
        """Show the present state.

        Args:
            sim: The environment's simulation.
            status: What stands in the caption.

        Raises:
            RenderError: If the window cannot be opened.
        """
        if self._is_closed:
            return
        task = sim.task_model.task
        cameras = tuple(get_suite(task.suite).cameras.values())
        images = np.empty((len(cameras), CAMERA_SIZE, CAMERA_SIZE, 3), np.uint8)
        self._scenes.render(sim, images, cameras)
        frame = draw_tile(list(images), task.instruction, status)
        step, at = self._shown
        due = at + max(0, status.step - step) / FPS
        time.sleep(min(max(0.0, due - time.monotonic()), 1.0))
        self._shown = status.step, time.monotonic()
        self.show_frame(frame)

    def show_frame(self, frame: np.ndarray) -> None:
        """Show a picture, (H, W, 3) uint8.

        Raises:
            RenderError: If the window cannot be opened.
        """
        pygame = _pygame()
        size = frame.shape[1], frame.shape[0]
        try:
            if self._window is None or self._window.get_size() != size:
                pygame.display.init()
                if not check_driver(pygame.display.get_driver()):
                    raise pygame.error(f"the display {os.environ.get('DISPLAY')} does not answer")
                pygame.display.set_caption("vla_gym")
                self._window = pygame.display.set_mode(size)
        except pygame.error as error:
            raise RenderError(
                f"The window of render_mode='human' cannot be opened ({error}): use "
                "render_mode='rgb_array' or 'vla-gym play'."
            ) from error
        self._window.blit(pygame.surfarray.make_surface(frame.swapaxes(0, 1)), (0, 0))
        pygame.display.flip()
        if any(
            event.type == pygame.QUIT
            or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE)
            for event in pygame.event.get()
        ):
            logger.info("The window was closed; the environment goes on without it.")
            self.close()

    def close(self) -> None:
        """Close the window and free the renderer; twice is fine."""
        self._scenes.close()
        self._is_closed = True
        if self._window is not None:
            self._window = None
            _pygame().display.quit()


def _pygame() -> Any:
    """Import pygame without its greeting, and without OpenGL: the renderers' context stays alone.

    Raises:
        RenderError: If it is not installed.
    """
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_FRAMEBUFFER_ACCELERATION", "0")
    try:
        import pygame
    except ImportError as error:
        raise RenderError(
            f"render_mode='human' needs pygame ({error}): pip install 'vla-gym[window]', or use "
            "render_mode='rgb_array' or 'vla-gym play'."
        ) from error
    return pygame
