"""``vla-gym play``: any policy on any tasks, tiled into one video."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vla_gym.envs.checks import as_integer, parse_init_states
from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.play.camera import Camera
from vla_gym.play.config import LABELS, PlayConfig, Who
from vla_gym.play.episodes import Outcome, Players, Start
from vla_gym.play.video import TilePainter, check_video_path, tiled_frames, write_video
from vla_gym.suites import get_suite, get_task
from vla_gym.variation import DomainVariation

# Most tiles of one video; more could not be made out.
MAX_TILES = 100


def main(config: PlayConfig) -> int:
    """Play as configured, write the video and a line an episode; return the exit status."""
    outcomes = []
    for outcome in play(config):
        outcomes.append(outcome)
        tqdm.write(str(outcome), file=sys.stdout)
    won = sum(outcome.success for outcome in outcomes)
    if len(outcomes) == 1:
        sys.stdout.write(f"{config.out}: {'success' if won else 'no success'}\n")
    else:
        sys.stdout.write(f"{config.out}: {won} of {len(outcomes)} succeeded\n")
    return 0


def play(
    config: PlayConfig, act: Callable[[Any], np.ndarray] | None = None, label: str | None = None
) -> Iterator[Outcome]:
    """Play all episodes, then write the video.

    Args:
        config: What to play.
        act: With ``who="policy"``, a function from an observation of ``LiberoVLA-*`` (a dict of
            unbatched arrays) to an action (C, 7), in place of the file ``config.policy``.
        label: What the caption calls who acts.

    Yields:
        The outcome of each episode as it ends; the video is there when all have been taken.

    Raises:
        ConfigError: If options contradict each other or the video cannot be written.
        UnknownTaskError: If a task does not exist, or has no expert to play it.
    """
    starts = list(_starts(config))
    _check(config, starts, act)
    players = Players(config, act)
    cameras = ("agentview", "wrist") if config.cameras == "both" else (config.cameras,)
    size = config.size or (256 if len(starts) <= 4 else 192 if len(starts) <= 16 else 128)
    painter = TilePainter(size, len(cameras), [start.task.instruction for start in starts])
    tiles = []
    limit = sum(config.max_steps or start.task.max_control_steps for start in starts)
    # Shown in a terminal only.
    with tqdm(total=limit, unit="step", disable=None, leave=False) as bar:
        camera = Camera(painter, cameras, size, bar.update)
        try:
            for number, start in enumerate(starts, 1):
                bar.set_description(f"episode {number}/{len(starts)}")
                camera.begin(f"{label or LABELS[config.who]}   {start.name}")
                outcome = players.play(start, camera)
                limit -= camera.limit - outcome.steps
                bar.total = limit
                tiles.append(camera.frames)
                yield outcome
        finally:
            camera.close()
            players.close()
        frames = tiled_frames(tiles)
        length = max(len(tile) for tile in tiles)
        write_video(
            config.out, tqdm(frames, "video", length, unit="frame", disable=None, leave=False)
        )


def _starts(config: PlayConfig) -> Iterator[Start]:
    for task_id in config.task_ids:
        task = get_task(config.suite, task_id)
        if config.seeds:
            yield from (Start(task, None, as_integer(s, "seeds", 0)) for s in config.seeds)
        else:
            states = parse_init_states(
                config.init_state_ids, get_suite(config.suite).num_init_states
            )
            yield from (Start(task, int(state), 0) for state in states)


def _check(config: PlayConfig, starts: list[Start], act: Any) -> None:
    """Raise an error for options that cannot be."""
    if (config.policy is not None or act is not None) != (config.who == "policy"):
        raise ConfigError("--policy and --who policy belong together: give both or neither.")
    if config.rl_token is not None and config.who != "policy":
        raise ConfigError(f"--rl-token belongs to --who policy, got --who {config.who}.")
    if not 1 <= len(starts) <= MAX_TILES:
        raise ConfigError(
            f"Expected 1..{MAX_TILES} episodes (tasks times states), got {len(starts)}."
        )
    if config.size is not None and (config.size % 2 or not 64 <= config.size <= 1024):
        raise ConfigError(f"size must be even and in 64..1024, got {config.size}.")
    if config.max_steps is not None:
        as_integer(config.max_steps, "max_steps", 1)
    DomainVariation.parse(config.variation)
    check_video_path(config.out)
    if config.who == "expert":
        from vla_gym.experts import EXPERT_TASKS

        for start in starts:
            known = EXPERT_TASKS.get(start.task.suite, ())
            if start.task.task_id not in known:
                raise UnknownTaskError(
                    f"No expert for task {start.task.task_id} of suite {start.task.suite!r}: "
                    "see 'vla-gym tasks', or choose --who vla or --who random."
                )


def record_expert(
    path: str | Path, suite: str, task_id: int, *, init_state_id: int = 0, **options: Any
) -> bool:
    """Record the scripted expert on one official state.

    Args:
        path: The .mp4 or .gif to write.
        suite: Suite name.
        task_id: A task with an expert (``vla_gym.experts.EXPERT_TASKS``).
        init_state_id: Official initial state, 0..49.
        **options: Further fields of :class:`PlayConfig`.

    Returns:
        Whether the episode succeeded.
    """
    (outcome,) = play(
        PlayConfig(
            suite, (task_id,), "expert", init_state_ids=(init_state_id,), out=Path(path), **options
        )
    )
    return outcome.success


def record_policy(
    path: str | Path,
    suite: str,
    task_id: int,
    *,
    policy: Callable[[Any], np.ndarray] | None = None,
    label: str | None = None,
    init_state_id: int = 0,
    **options: Any,
) -> bool:
    """Record the frozen VLA, or a policy on top of it, on one official state.

    Args:
        path: The .mp4 or .gif to write.
        suite: Suite name.
        task_id: Index of the task.
        policy: None for the VLA's own actions, else a function from an observation of
            ``LiberoVLA-*`` (a dict of unbatched arrays) to an action (C, 7).
        label: What the caption calls who acts.
        init_state_id: Official initial state, 0..49.
        **options: Further fields of :class:`PlayConfig`; ``vla`` may also be the model itself.

    Returns:
        Whether the episode succeeded.
    """
    who: Who = "vla" if policy is None else "policy"
    config = PlayConfig(
        suite, (task_id,), who, init_state_ids=(init_state_id,), out=Path(path), **options
    )
    (outcome,) = play(config, policy, label)
    return outcome.success
