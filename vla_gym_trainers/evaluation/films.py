"""Videos and film strips of episodes: played again, which gives the same episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.errors import VlaGymError
from vla_gym.play.video import TileFrames, compose_grid, tiled_frames, write_video
from vla_gym.rollout import Episode, Policy
from vla_gym.rollout.film import film

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
    policy: Policy,
    settings: dict[str, Any],
    episodes: Sequence[Episode],
    folder: Path,
    on_done: Callable[[], Any] = lambda: None,
) -> list[Path]:
    """Write a video of each episode and a film strip of each task.

    Args:
        policy: As it played them.
        settings: Of the environments, as it played them.
        episodes: Which ones, task by task, see :func:`choose`.
        folder: Where ``goal_8_state_03_success.mp4`` and ``goal_8.png`` go.
        on_done: Called after each video.

    Returns:
        The files.

    Raises:
        ReplayError: If an episode ends otherwise than before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    strips: dict[str, list[np.ndarray]] = {}
    filmed = film(policy, [episode.start for episode in episodes], **settings)
    for before, (now, frames) in zip(episodes, filmed, strict=True):
        if (before.success, before.length) != (now.success, now.length):
            raise ReplayError(
                f"{before.start} ended after {now.length} steps (success: {now.success}) when it "
                f"was filmed, after {before.length} (success: {before.success}) when it was "
                "counted. Is the policy deterministic, and the machine the same?"
            )
        task = f"{before.suite}_{before.task_id}"
        outcome = "success" if before.success else "failure"
        file = folder / f"{task}_state_{before.init_state_id:02d}_{outcome}.mp4"
        files.append(write_video(file, tiled_frames([frames])))
        strips.setdefault(task, []).append(strip(frames))
        on_done()
    for task, rows in strips.items():
        files.append(folder / f"{task}.png")
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


def _write_png(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    scratch = path.with_name(f".{path.name}")
    Image.fromarray(picture).save(scratch, "PNG")
    scratch.replace(path)
