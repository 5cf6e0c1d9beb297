"""Videos of episodes: played again, which gives the same episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vla_gym.errors import VlaGymError
from vla_gym.rollout import Episode, Policy
from vla_gym.rollout.film import film
from vla_gym.rollout.video import tiled_frames, write_video
from vla_gym_trainers.evaluation.summary import by_task


def choose(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Return the first ``count`` successes and failures of each task, task by task."""
    chosen = []
    for played in by_task(episodes).values():
        for success in (True, False):
            chosen += [e for e in played if e.success == success][:count]
    return chosen


def make_films(
    policy: Policy,
    settings: dict[str, Any],
    episodes: Sequence[Episode],
    folder: Path,
) -> Iterator[Path]:
    """Write a video of each episode, such as ``goal_8_state_03_success.mp4``; yield the files.

    Policy and settings of the environments are those that played them.

    Raises:
        VlaGymError: If an episode ends otherwise than before.
    """
    filmed = film(policy, [episode.start for episode in episodes], **settings)
    for before, (now, frames) in zip(episodes, filmed, strict=True):
        if (before.success, before.length) != (now.success, now.length):
            raise VlaGymError(
                f"{before.start} ended after {now.length} steps (success: {now.success}) when it "
                f"was filmed, after {before.length} (success: {before.success}) when it was "
                "counted. Is the policy deterministic, and the machine the same?"
            )
        start = before.start
        layout = f"state_{start.init_state_id:02d}"
        if start.init_state_id < 0:
            layout = f"seed_{start.seed}"
        place = f"{start.suite}_{start.task_id}_{layout}"
        outcome = "success" if before.success else "failure"
        yield write_video(folder / f"{place}_{outcome}.mp4", tiled_frames([frames]))
