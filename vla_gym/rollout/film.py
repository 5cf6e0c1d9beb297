"""Films episodes while they are played: a frame at the reset and one each control step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.envs.checks import MAX_IMAGE_SIZE, as_integer, parse_cameras
from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.scene_cache import SceneCache
from vla_gym.errors import ConfigError
from vla_gym.rollout import video
from vla_gym.rollout.episodes import Episode, Start
from vla_gym.rollout.player import play
from vla_gym.rollout.policies import Policy
from vla_gym.suites import get_suite, get_task


def film(
    policy: Policy,
    starts: Sequence[Start],
    *,
    cameras: Sequence[str] | None = None,
    size: int = 256,
    on_step: Callable[[], Any] = lambda: None,
    **settings: Any,
) -> Iterator[tuple[Episode, video.TileFrames]]:
    """Play each start once, one after the other in this process, and film it.

    The frames come from renderers of their own: what the policy observes, and so what it does, is
    as without a film.

    Args:
        policy: Who acts.
        starts: They are played in this order.
        cameras: Which of the suite's cameras; None: all.
        size: Height and width of a camera's picture in pixels.
        on_step: Called after each control step.
        **settings: Of the environments, see :func:`~vla_gym.rollout.make_envs`.

    Yields:
        Each episode and its frames.

    Raises:
        ConfigError: If there is nothing to film: no start, no camera, or none of that name.
    """
    if not starts:
        raise ConfigError("A film takes at least one start, got none.")
    size = as_integer(size, "size", 1, MAX_IMAGE_SIZE)
    suites = list(dict.fromkeys(start.suite for start in starts))
    starts = sorted(starts, key=lambda start: suites.index(start.suite))
    texts = [get_task(start.suite, start.task_id).instruction for start in starts]
    views = {suite: parse_cameras(get_suite(suite), cameras) for suite in suites}
    if not all(views.values()):
        raise ConfigError("A film takes at least one camera, got none.")
    rows = video.text_rows(texts, size * min(map(len, views.values())))
    # The physics is not used: this cache only keeps renderers, a few scenes at a time.
    scenes = SceneCache(image_size=size, visual_profile=None, max_scenes=2)
    captions = iter([start.label() for start in starts])
    frames, caption = video.TileFrames(), ""

    def shoot(env: LiberoEnv, info: dict[str, Any]) -> None:
        nonlocal frames, caption
        step = int(info["elapsed_steps"])
        if step == 0:
            frames, caption = video.TileFrames(), f"{policy.name}   {next(captions)}"
        else:
            on_step()
        task = env.task_model.task
        limit = env.max_control_steps or task.max_control_steps
        names = [get_suite(task.suite).cameras[name] for name in views[env.suite]]
        images = np.empty((len(names), size, size, 3), np.uint8)
        scenes.render(env.sim, images, names)
        success = bool(info["success"])
        status = video.Status(caption, step, limit, success, success or step >= limit)
        frames.append(video.draw_tile(list(images), task.instruction, status, rows))

    def wrap(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        assert isinstance(env.unwrapped, LiberoEnv)
        env.unwrapped.on_control_step.append(shoot)
        return env

    wrappers = [*settings.pop("env_wrappers", ()), wrap]
    try:
        # One at a time: the next reset begins only when the episode has been taken.
        for episode in play(
            policy, starts, num_envs=1, workers=0, env_wrappers=wrappers, **settings
        ):
            yield episode, frames
    finally:
        scenes.close()


def record_video(
    path: str | Path, policy: Policy, starts: Sequence[Start], **settings: Any
) -> list[Episode]:
    """Film episodes and tile them into one video.

    Args:
        path: The .mp4 or .gif to write; its folder is made.
        policy: Who acts.
        starts: One tile each.
        **settings: See :func:`film`.

    Returns:
        The episodes.

    Raises:
        ConfigError: If the video cannot be written, or there is nothing to film.
    """
    video.check_video_path(Path(path))
    episodes, tiles = zip(*film(policy, starts, **settings), strict=True)
    video.write_video(path, video.tiled_frames(tiles))
    return list(episodes)
