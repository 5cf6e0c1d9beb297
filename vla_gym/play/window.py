"""``render_mode="human"``: both cameras, instruction, step and outcome in a window."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.errors import RenderError
from vla_gym.play.video import FPS, Status, TilePainter
from vla_gym.play.window_process import HEADER

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

logger = logging.getLogger(__name__)

CAMERA_SIZE = 384  # pixels a side
# Seconds that the window may take to open, and to take a frame.
OPEN_DEADLINE = 20.0
FRAME_DEADLINE = 10.0


def has_display() -> bool:
    """Tell whether this process can expect to open a window."""
    if not sys.platform.startswith("linux"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


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


class FrameWindow:
    """A window in a process of its own; closing it by hand only ends the showing."""

    def __init__(self, title: str) -> None:
        """Open the window; it appears with the first frame.

        Raises:
            RenderError: If there is no display, or no window on it.
        """
        check_display()
        # The off-screen renderers' choice of platform is not the window's. -P: the folder of this
        # package must not be searched for modules.
        environment = {k: v for k, v in os.environ.items() if k != "PYOPENGL_PLATFORM"}
        script = Path(__file__).with_name("window_process.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(script), title],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._process: subprocess.Popen[bytes] | None = process
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        if select.select([process.stdout], [], [], OPEN_DEADLINE)[0]:
            answer = process.stdout.readline()
        if answer.strip() != b"ready":
            self.close()
            reason = answer.decode(errors="replace").strip() or "it did not start"
            raise RenderError(
                f"The window of render_mode='human' cannot be opened ({reason}). It needs a "
                "display with OpenGL, and the packages glfw and PyOpenGL (pip install glfw "
                "PyOpenGL). Without them: render_mode='rgb_array' or 'vla-gym play'."
            )
        os.set_blocking(process.stdin.fileno(), False)

    @property
    def closed(self) -> bool:
        """Whether the window is gone."""
        return self._process is None

    def show(self, frame: np.ndarray) -> None:
        """Show a frame, (H, W, 3) uint8; does nothing once the window is closed.

        Raises:
            RenderError: If the window hangs.
        """
        if self._process is None:
            return
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        data = memoryview(HEADER.pack(*frame.shape[:2]) + np.ascontiguousarray(frame).tobytes())
        try:
            while data:
                if not select.select([], [pipe], [], FRAME_DEADLINE)[1]:
                    self.close()
                    raise RenderError(
                        f"The window took no frame for {FRAME_DEADLINE:.0f} s: the display hangs."
                    )
                data = data[os.write(pipe, data) :]
        except BrokenPipeError:
            logger.info("The window was closed; the environment goes on without it.")
            self.close()

    def close(self) -> None:
        """Close the window; twice is fine."""
        self._process = None
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the window's process: it goes by itself at the end of its input."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=5.0)


class HumanView:
    """Shows an environment's episodes in a window, at most 20 control steps a second."""

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
        self._window: FrameWindow | None = None
        self._shown = (0, 0.0)

    def show(self, sim: LiberoSim, status: Status) -> None:
        """Show the present state.

        Args:
            sim: The environment's simulation.
            status: What stands in the caption.

        Raises:
            RenderError: If the window cannot be opened or hangs.
        """
        if self._window is None:
            self._window = FrameWindow("vla_gym")
        if self._window.closed:
            return
        task = sim.task_model.task
        images = np.empty((2, CAMERA_SIZE, CAMERA_SIZE, 3), np.uint8)
        self._scenes.render(sim, images, ("agentview", "robot0_eye_in_hand"))
        painter = TilePainter(CAMERA_SIZE, 2, [task.instruction])
        frame = painter.draw(list(images), task.instruction, status)
        step, at = self._shown
        due = at + max(0, status.step - step) / FPS
        time.sleep(min(max(0.0, due - time.monotonic()), 1.0))
        self._shown = status.step, time.monotonic()
        self._window.show(frame)

    def close(self) -> None:
        """Close the window and free the renderer."""
        self._scenes.close()
        if self._window is not None:
            self._window.close()
            self._window = None
