"""render_mode="human": what the window shows, and one clear error where there can be none."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, RenderError
from vla_gym.play.window import HumanView

pygame = pytest.importorskip("pygame")


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SDL draws into memory; gives a function that returns the picture (H, W, 3) uint8."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    return lambda: pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1)


def test_a_frame_is_shown_pixel_for_pixel(window: Any) -> None:
    view = HumanView()
    for frame in np.random.default_rng(0).integers(0, 255, (2, 201, 303, 3), dtype=np.uint8):
        view.show_frame(frame)
        np.testing.assert_array_equal(window(), frame)
    view.close()
    view.close()
    assert not pygame.display.get_init()


def test_an_environment_shows_itself_until_the_window_is_closed(window: Any) -> None:
    env = LiberoEnv("goal", task_ids=8, image_size=64, render_mode="human", max_control_steps=4)
    try:
        env.reset(seed=0)
        assert window()[:384, :768].std() > 20
        started = time.monotonic()
        for _ in range(3):
            before = window()[400:440]
            env.step(np.ones(7))
            assert (window()[400:440] != before).any()  # the caption counts
        assert time.monotonic() - started > 0.1  # 20 steps a second
        assert env.render() is None
        pygame.event.post(pygame.event.Event(pygame.QUIT))
        _, _, _, truncated, _ = env.step(np.ones(7))
        assert truncated and not pygame.display.get_init()  # closing it only ends the showing
        env.reset()
        assert not pygame.display.get_init()
    finally:
        env.close()


@pytest.mark.parametrize("env_id", ["Libero-goal-v0", "LiberoVLA-goal-v0"])
def test_without_a_display_is_one_clear_error(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    with pytest.raises(RenderError, match="needs a display.*rgb_array.*vla-gym play"):
        gym.make(f"vla_gym:{env_id}", render_mode="human")


def test_a_display_that_does_not_answer_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISPLAY", ":9876")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    with pytest.raises(RenderError, match="cannot be opened .*:9876"):
        HumanView().show_frame(np.zeros((64, 64, 3), np.uint8))


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="'rgb_array', 'human'"):
        LiberoEnv("goal", render_mode="ansi")
