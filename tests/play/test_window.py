"""render_mode="human": what the window shows, and one clear error where there can be none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, RenderError
from vla_gym.play.window import FrameWindow

needs_xvfb = pytest.mark.skipif(
    shutil.which("Xvfb") is None or find_spec("Xlib") is None,
    reason="needs Xvfb (apt-get install xvfb) and python-xlib",
)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An X server of its own; gives a function that returns its picture (H, W, 3) uint8."""
    from Xlib import X, display

    read, write = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write), "-screen", "0", "1024x600x24", "+extension", "GLX"],
        pass_fds=[write],
        stderr=subprocess.DEVNULL,
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        name = f":{pipe.readline().strip()}"
    monkeypatch.setenv("DISPLAY", name)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    connection = display.Display(name)

    def picture() -> np.ndarray:
        raw = connection.screen().root.get_image(0, 0, 1024, 600, X.ZPixmap, 0xFFFFFFFF)
        return np.frombuffer(raw.data, np.uint8).reshape(600, 1024, 4)[..., 2::-1]

    yield picture
    connection.close()
    server.terminate()
    server.wait(timeout=20)


def wait_until(condition: Any, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@needs_xvfb
def test_a_frame_is_shown_pixel_for_pixel(screen: Any) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (2, 201, 303, 3), dtype=np.uint8)
    window = FrameWindow("test")
    process = window._process
    assert process is not None
    try:
        for frame in frames:
            window.show(frame)
            assert wait_until(lambda f=frame: (screen()[:201, :303] == f).all())
    finally:
        window.close()
    assert process.poll() is not None and window.closed


@needs_xvfb
def test_closing_the_window_by_hand_only_ends_the_showing(screen: Any) -> None:
    window = FrameWindow("test")
    process = window._process
    assert process is not None
    process.terminate()
    process.wait(timeout=10)
    for _ in range(3):
        window.show(np.zeros((64, 64, 3), np.uint8))
    assert window.closed


@needs_xvfb
def test_the_window_goes_with_its_process(screen: Any) -> None:
    code = (
        "import os, sys, numpy as np\nfrom vla_gym.play.window import FrameWindow\n"
        "window = FrameWindow('x'); window.show(np.full((90, 90, 3), 200, np.uint8))\n"
        "print('shown', flush=True); sys.stdin.read()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert run.stdin is not None and run.stdout is not None
    assert run.stdout.readline() == b"shown\n"
    assert wait_until(lambda: (screen()[:90, :90] == 200).all())
    run.kill()
    run.wait(timeout=10)
    assert wait_until(lambda: (screen()[:90, :90] == 0).all())


@needs_xvfb
def test_an_environment_shows_itself(screen: Any) -> None:
    env = LiberoEnv("goal", task_ids=8, image_size=64, render_mode="human", max_control_steps=3)
    try:
        env.reset(seed=0)
        assert wait_until(lambda: screen()[:384, :768].std() > 20)
        started = time.monotonic()
        for _ in range(3):
            before = screen()[400:440, :768]
            env.step(np.ones(7))
            assert wait_until(lambda b=before: (screen()[400:440, :768] != b).any())
        assert time.monotonic() - started > 0.1  # 20 steps a second
        assert env.render() is None
    finally:
        env.close()
    assert wait_until(lambda: (screen() == 0).all())


@pytest.mark.parametrize("env_id", ["Libero-goal-v0", "LiberoVLA-goal-v0"])
def test_without_a_display_is_one_clear_error(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(RenderError, match="needs a display.*rgb_array.*vla-gym play"):
        gym.make(f"vla_gym:{env_id}", render_mode="human")


def test_a_display_that_does_not_answer_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISPLAY", ":9876")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(RenderError, match="cannot be opened .*:9876"):
        FrameWindow("test")


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="'rgb_array', 'human'"):
        LiberoEnv("goal", render_mode="ansi")
