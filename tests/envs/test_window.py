"""render_mode="human": Gymnasium's window, and one clear error where there can be none."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import RenderError

pygame = pytest.importorskip("pygame")


@pytest.mark.parametrize("env_id", ["Libero-goal-v0", "LiberoVLA-goal-v0"])
def test_the_window_shows_the_main_camera(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # SDL draws into memory
    shown: list[Any] = []
    flip = pygame.display.flip
    monkeypatch.setattr(
        pygame.display,
        "flip",
        lambda: (shown.append(pygame.surfarray.array3d(pygame.display.get_surface())), flip()),
    )
    with gym.make(f"vla_gym:{env_id}", task_ids=8, render_mode="human") as env:
        env.reset(seed=0)
        env.step(np.ones(env.action_space.shape, np.float32))
        base = env.unwrapped
        assert isinstance(base, LiberoEnv) and len(shown) == 2
        np.testing.assert_array_equal(shown[-1].swapaxes(0, 1), base.render())
        assert (shown[0] != shown[1]).any()


@pytest.mark.parametrize("env_id", ["Libero-goal-v0", "LiberoVLA-goal-v0"])
def test_without_a_display_is_one_clear_error(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RenderError, match="needs a display.*rgb_array.*vla-gym play"):
        gym.make(f"vla_gym:{env_id}", render_mode="human")
