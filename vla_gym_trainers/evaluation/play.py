"""``vla-gym play``: any policy on any tasks, tiled into one video."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from msgspec import Meta
from tqdm import tqdm

from vla_gym.envs.checks import as_integer, parse_init_states, parse_tasks
from vla_gym.errors import ConfigError
from vla_gym.outside import PositiveInt
from vla_gym.rollout import Episode, Start
from vla_gym.rollout.film import film
from vla_gym.rollout.video import check_video_path, tiled_frames, write_video
from vla_gym.suites import choose_suite, get_suite, get_task
from vla_gym_trainers.evaluation.policy_config import PolicyConfig

# Most tiles of one video; more could not be made out.
MAX_TILES = 100


@dataclass
class PlayConfig(PolicyConfig):
    """Play episodes and write one video: cameras, instruction, step, outcome.

    Every task is played from every state (or seed); more than one episode are tiled.
    """

    policy: str = "expert"
    """Who acts: expert (scripted, sees the simulation), vla, random, or a trained policy: a run
    directory of vla-gym-train, or its policy.safetensors."""
    suite: Annotated[str, tyro.conf.arg(help_behavior_hint="(default: goal)")] = ""
    """Suite name."""
    task_ids: Annotated[tuple[int, ...] | None, tyro.conf.arg(aliases=["--task-id"])] = None
    """Tasks in the suite, see vla-gym tasks; default: 8, with --bddl-path all."""
    init_state_ids: Annotated[
        tuple[int, ...] | None, tyro.conf.arg(aliases=["--init-state-id"])
    ] = None
    """Official initial states, from 0; LIBERO has 50. Default: 0, with --bddl-path seed 0."""
    seeds: tuple[int, ...] = ()
    """Play layouts sampled with these seeds instead of official states."""
    cameras: tuple[str, ...] | None = None
    """What the video shows, e.g. agentview wrist; default: all cameras of the suite."""
    size: Annotated[int, Meta(ge=64, le=1024, multiple_of=2)] | None = None
    """Pixels of a camera's side; default: 256 for up to four tiles, less for more."""
    max_steps: PositiveInt | None = None
    """End an episode after so many control steps; default: the suite's limit."""
    out: Path = Path("episode.mp4")
    """The video; .mp4 or .gif."""

    def __post_init__(self) -> None:
        """Read the files of ``bddl_path``; they are the suite from then on."""
        if self.bddl_path:
            self.suite = str(choose_suite(self.suite or None, self.bddl_path))
        self.suite, self.bddl_path = self.suite or "goal", None

    def starts(self) -> list[Start]:
        """Return where the episodes begin."""
        suite = get_suite(self.suite)
        usual = (8,) if suite.num_init_states else None
        tasks = parse_tasks(suite, usual if self.task_ids is None else self.task_ids)
        by_seed = not suite.num_init_states and self.init_state_ids is None
        if seeds := self.seeds or ((0,) if by_seed else ()):
            seeds = tuple(as_integer(seed, "seeds", 0) for seed in seeds)
            return [Start(suite.name, task, seed=seed) for task in tasks for seed in seeds]
        ids = (0,) if self.init_state_ids is None else self.init_state_ids
        states = parse_init_states(ids, suite.num_init_states)
        look = self.episodes_a_look
        return [Start.official(suite.name, i, s, look) for i in tasks for s in states]

    def check(self) -> None:
        """Check what can be checked without loading anything.

        Raises:
            ConfigError: If options contradict each other or the video cannot be written.
            UnknownTaskError: If a task does not exist, or has no expert to play it.
        """
        self.check_env()
        if self.seeds and self.init_state_ids is not None:
            raise ConfigError("Give --seeds or --init-state-ids, not both.")
        starts = self.starts()
        if not 1 <= len(starts) <= MAX_TILES:
            raise ConfigError(
                f"Expected 1..{MAX_TILES} episodes (tasks times states), got {len(starts)}."
            )
        known = tuple(get_suite(self.suite).cameras)
        if self.cameras is not None and not 0 < len(set(self.cameras) & set(known)) == len(
            self.cameras
        ):
            raise ConfigError(f"--cameras must be of {', '.join(known)}, got {self.cameras}.")
        check_video_path(self.out)
        self.check_policy(starts)


def main(config: PlayConfig) -> int:
    """Play as configured, write the video and a line an episode; return the exit status."""
    episodes = play_video(config)
    won = sum(episode.success for episode in episodes)
    if len(episodes) == 1:
        sys.stdout.write(f"{config.out}: {'success' if won else 'no success'}\n")
    else:
        sys.stdout.write(f"{config.out}: {won} of {len(episodes)} succeeded\n")
    return 0


def play_video(config: PlayConfig) -> list[Episode]:
    """Play all episodes with a line about each, then write the video.

    Raises:
        ConfigError, UnknownTaskError: See :meth:`PlayConfig.check`.
        WeightsError: If there is no such policy or VLA, or a file is damaged.
    """
    config.check()
    starts = config.starts()
    policy = config.make_policy()
    size = config.size or (256 if len(starts) <= 4 else 192 if len(starts) <= 16 else 128)
    settings: dict[str, Any] = {
        "cameras": config.cameras,
        "size": size,
        "max_control_steps": config.max_steps,
        **config.env_kwargs(),
    }
    episodes, tiles = [], []
    # Shown in a terminal only.
    with tqdm(unit="step", disable=None, leave=False) as bar:
        for episode, frames in film(policy, starts, on_step=bar.update, **settings):
            episodes.append(episode)
            tiles.append(frames)
            end = "success" if episode.success else "no success"
            text = get_task(episode.suite, episode.task_id).instruction
            line = f"{episode.start.label()}: {end}, {episode.length} steps ({text})"
            tqdm.write(line, file=sys.stdout)
    length = max(len(tile) for tile in tiles)
    pictures = tiled_frames(tiles)
    write_video(
        config.out, tqdm(pictures, "video", length, unit="frame", disable=None, leave=False)
    )
    return episodes
