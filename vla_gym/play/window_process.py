"""A window that shows frames from standard input; run as a script by :mod:`vla_gym.play.window`.

A process of its own: its OpenGL context cannot get in the way of the renderers' off-screen ones,
and the window answers while the simulation computes. It ends at the end of its input, so also when
the environment's process dies. Each frame is height and width (two unsigned 32-bit integers in
native order) and height * width * 3 bytes, first row on top. Nothing of vla_gym is imported.
"""

from __future__ import annotations

import contextlib
import select
import struct
import sys
from typing import Any

HEADER = struct.Struct("II")
# Seconds between looks at keyboard and mouse while no frame comes.
_POLL = 0.02


def main(title: str) -> None:
    """Open the window, say ``ready`` or what is wrong, and show frames until the input ends."""
    try:
        import glfw

        glfw.ERROR_REPORTING = "ignore"  # not as warnings: get_error() has them
        window = _open(glfw, title)
    except Exception as error:  # whatever it is, the environment's process must hear of it
        print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)  # noqa: T201
        return
    print("ready", flush=True)  # noqa: T201
    with contextlib.suppress(KeyboardInterrupt):
        _show_frames(glfw, window)
    glfw.terminate()


def _open(glfw: Any, title: str) -> Any:
    """Return a hidden window with a current OpenGL context.

    Raises:
        Exception: If there is no display or no OpenGL on it.
    """
    if not glfw.init():
        raise RuntimeError(_last_error(glfw) or "GLFW cannot start")
    glfw.window_hint(glfw.VISIBLE, glfw.FALSE)
    window = glfw.create_window(640, 480, title, None, None)
    if not window:
        raise RuntimeError(_last_error(glfw) or "the display offers no OpenGL window")
    glfw.make_context_current(window)
    from OpenGL import GL

    GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 1)
    return window


def _last_error(glfw: Any) -> str:
    _, message = glfw.get_error()
    return message.decode(errors="replace") if message else ""


def _show_frames(glfw: Any, window: Any) -> None:
    source = sys.stdin.buffer
    frame: tuple[int, int, bytes] | None = None
    redraw = [False]
    glfw.set_window_refresh_callback(window, lambda _: redraw.__setitem__(0, True))
    while not glfw.window_should_close(window):
        glfw.poll_events()
        if glfw.get_key(window, glfw.KEY_ESCAPE) == glfw.PRESS:
            return
        if select.select([source], [], [], _POLL)[0]:
            header = source.read(HEADER.size)
            if len(header) < HEADER.size:
                return
            height, width = HEADER.unpack(header)
            pixels = source.read(3 * height * width)
            if len(pixels) < 3 * height * width:
                return
            if frame is None:
                glfw.set_window_size(window, width, height)
                glfw.show_window(window)
            frame = height, width, pixels
            redraw[0] = True
        if frame is not None and redraw[0]:
            redraw[0] = False
            _draw(glfw, window, *frame)


def _draw(glfw: Any, window: Any, height: int, width: int, pixels: bytes) -> None:
    """Draw a frame as large as fits into the window, in its middle."""
    from OpenGL import GL

    room_x, room_y = glfw.get_framebuffer_size(window)
    zoom = min(room_x / width, room_y / height)
    GL.glViewport(0, 0, room_x, room_y)
    GL.glClear(GL.GL_COLOR_BUFFER_BIT)
    if zoom > 0:
        GL.glRasterPos2f(-zoom * width / room_x, zoom * height / room_y)
        GL.glPixelZoom(zoom, -zoom)
        GL.glDrawPixels(width, height, GL.GL_RGB, GL.GL_UNSIGNED_BYTE, pixels)
    glfw.swap_buffers(window)


if __name__ == "__main__":
    main(sys.argv[1])
