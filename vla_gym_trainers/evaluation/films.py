"""Videos and film strips of episodes: played again, which gives the same episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import VlaGymError
from vla_gym.play.camera import Camera
from vla_gym.play.video import TileFrames, TilePainter, compose_grid, tiled_frames, write_video
from vla_gym.suites import get_task
from vla_gym_trainers.evaluation.episodes import Episode, Start
from vla_gym_trainers.evaluation.player import Player

VIEWS = ("agentview", "wrist")
# Pixels of a camera's side in videos; strips show every second one.
SIZE = 256
# Frames of a strip, first and last included.
COLUMNS = 6


class ReplayError(VlaGymError, RuntimeError):
    """An episode that was played again did not go as before."""


def choose(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Return the first ``count`` successes and failures of each task, task by task."""
    chosen = []
    for task in dict.fromkeys((e.suite, e.task_id) for e in episodes):
        mine = [e for e in episodes if (e.suite, e.task_id) == task]
        for success in (True, False):
            chosen += [e for e in mine if e.success == success][:count]
    return chosen


def make_films(
    player: Player,
    episodes: Sequence[Episode],
    folder: Path,
    on_done: Callable[[], Any] = lambda: None,
) -> list[Path]:
    """Write a video of each episode and a film strip of each task.

    Args:
        player: As it played them.
        episodes: Which ones, see :func:`choose`.
        folder: Where ``goal_8_state_03_success.mp4`` and ``goal_8.png`` go.
        on_done: Called after each video.

    Returns:
        The files.

    Raises:
        ReplayError: If an episode ends otherwise than before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for suite, task_id in dict.fromkeys((e.suite, e.task_id) for e in episodes):
        mine = [e for e in episodes if (e.suite, e.task_id) == (suite, task_id)]
        rows = []
        for episode, frames in zip(mine, _film(player, mine), strict=True):
            outcome = "success" if episode.success else "failure"
            file = folder / f"{suite}_{task_id}_state_{episode.init_state_id:02d}_{outcome}.mp4"
            files.append(write_video(file, tiled_frames([frames])))
            rows.append(strip(frames))
            on_done()
        files.append(folder / f"{suite}_{task_id}.png")
        _write_png(files[-1], compose_grid(rows, 1))
    return files


def strip(frames: TileFrames) -> np.ndarray:
    """Return frames from the first to the last side by side, half as large as in the video."""
    numbers = np.linspace(0, len(frames) - 1, COLUMNS).round().astype(int)
    return compose_grid([_halved(frames[i]) for i in numbers.tolist()], COLUMNS)


def _halved(tile: np.ndarray) -> np.ndarray:
    from PIL import Image

    height, width = tile.shape[:2]
    return np.asarray(Image.fromarray(tile).resize((width // 2, height // 2), Image.Resampling.BOX))


def _film(player: Player, episodes: Sequence[Episode]) -> list[TileFrames]:
    """Play episodes of one task again, in this process, and return what was seen."""
    task = get_task(episodes[0].suite, episodes[0].task_id)
    painter = TilePainter(SIZE, len(VIEWS), [task.instruction])
    camera = Camera(painter, VIEWS, SIZE)
    again = replace(player, num_envs=1, workers=0, facts={"worker_restarts": 0})
    films = []

    def on_step(env: LiberoEnv, info: dict[str, Any], over: bool) -> None:
        if not info["elapsed_steps"]:
            start = Start(task.suite, task.task_id, int(info["init_state_id"]))
            camera.begin(f"{player.policy.name}   {start}")
            films.append(camera.frames)
        camera.take(env, info, over=over)

    try:
        played = list(again.play([episode.start for episode in episodes], on_step))
    finally:
        camera.close()
    for before, now in zip(episodes, played, strict=True):
        if before != now:
            raise ReplayError(
                f"{before.start} ended after {now.length} steps (success: {now.success}) when it "
                f"was filmed, after {before.length} (success: {before.success}) when it was "
                "counted. Is the policy deterministic, and the machine the same?"
            )
    return films


def _write_png(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    scratch = path.with_name(f".{path.name}")
    Image.fromarray(picture).save(scratch, "PNG")
    scratch.replace(path)
