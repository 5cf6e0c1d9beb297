"""Demonstrations as prior data: half of every batch comes from them (RLPD, arXiv 2302.02948)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from tqdm import tqdm

from vla_gym.assets import resolve_asset_pack
from vla_gym.demos.files import demo_path, read_episodes, read_success_steps
from vla_gym.errors import ConfigError
from vla_gym.suites import Task, get_task, suite_names
from vla_gym.suites.libero.tasks import suite_folder
from vla_gym.vla.base import CAMERAS
from vla_gym.wrappers.vector import FrozenVLAObservation
from vla_gym.wrappers.vla_features import VLAFeatures, look
from vla_gym_trainers.cloning.data import demo_files, read_packs
from vla_gym_trainers.rl_token.collect_states import frames_for
from vla_gym_trainers.rollout.chunks import Piece, joined
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.td3.replay import ChunkReplayBuffer
from vla_gym_trainers.td3.ring import DEMONSTRATED

#: Observations in one forward pass of the VLA.
BATCH = 32
#: What a demonstration can say about an observation.
KNOWN = {"rl_token", "vla_action", "proprio", "task_id"}


def demo_replay(config: TD3RunConfig, env: Any) -> ChunkReplayBuffer:
    """Return every chunk of C control steps in demonstrations of ``vla-gym demos``, as transitions.

    The frozen VLA looks at every frame. Episodes end with the action after which the goal held
    first, with reward 1; chunks that end with it are shorter, and are filled up with their last
    action.

    Not all tasks of the run need have any; see :func:`task_files`. ``env`` is a
    :class:`vla_gym.wrappers.vector.FrozenVLAObservation`.

    Raises:
        ConfigError: If there are no demonstrations of the tasks, or of others, whose frames may be
            those after the actions, or of another asset pack; or the observations hold what they do
            not tell (a VLA's memory, a world model's).
    """
    assert config.prior_demos is not None
    if not isinstance(env, FrozenVLAObservation) or env.features.memory.is_stateful:
        raise ConfigError(
            f"prior_demos are shown to a VLA without memory in a LiberoVLA-*, got {env}."
        )
    features = env.features
    if unknown := set(features.space) - KNOWN:
        raise ConfigError(
            f"Demonstrations do not tell the observations {', '.join(sorted(unknown))}: leave out "
            "prior_demos, or what makes these."
        )
    tasks = {i: get_task(config.suite, i) for i in config.tasks()}
    files = task_files(config.prior_demos, tasks)
    pack = resolve_asset_pack(config.assets).name
    for path in files:
        if (found := read_packs(path)) != {pack}:
            shown = " ".join(found) or "an asset pack that it does not name"
            raise ConfigError(
                f"{path} shows {shown}, the run {pack}: record it with 'vla-gym demos --assets "
                f"{config.assets}'."
            )
    episodes = [
        episode
        for path in tqdm(files, "demonstrations", unit="task", disable=not config.progress)
        for episode in _episodes(path, features, files[path], tasks[files[path]].instruction)
    ]
    chunk = features.space["vla_action"]
    replay = ChunkReplayBuffer(
        sum(len(actions) for _, actions in episodes),
        spaces.Dict({**features.space.spaces, DEMONSTRATED: chunk}),
        chunk,
        gamma=config.gamma,
        seed=config.seed,
        balanced=config.balanced_replay,
    )
    for obs, actions in episodes:
        _play(replay, obs, actions, features.chunk_len, config.gamma)
    return replay


def task_files(folder: Path, tasks: Mapping[int, Task]) -> dict[Path, int]:
    """Return the files of demonstrations below a folder, or the file itself, and whose each is.

    Files of other tasks than these, by their numbers in the suite that is played, are left out.

    Raises:
        ConfigError: If no file is left.
    """
    numbers = {path: _number(path, tasks) for path in demo_files(folder)}
    files = {path: number for path, number in numbers.items() if number is not None}
    if not files:
        names = " or ".join(demo_path(folder, task).name for task in tasks.values())
        raise ConfigError(
            f"{folder} has no {names}: record demonstrations of the tasks with 'vla-gym demos'."
        )
    return files


def _number(path: Path, tasks: Mapping[int, Task]) -> int | None:
    """Return which of the tasks a file is of; in a suite's own folder those of no other suite."""
    folder = path.parent.name.replace("-", "_")
    is_suite = folder in map(suite_folder, suite_names())
    for number, task in tasks.items():
        if demo_path(path, task).name == path.name and (
            suite_folder(task.suite) == folder or not is_suite
        ):
            return number
    return None


def _play(
    replay: ChunkReplayBuffer,
    obs: dict[str, np.ndarray],
    actions: np.ndarray,
    chunk_len: int,
    gamma: float,
) -> None:
    """Push an episode chunk by chunk, as environments with a stride of 1 would play it."""
    rows = [{key: value[t] for key, value in obs.items()} for t in range(len(actions))]
    rows.append(rows[-1])  # what is seen after the success is never looked at
    for t in range(0, len(actions), chunk_len):
        end = min(t + chunk_len, len(actions))
        done = end == len(actions)
        planned = np.minimum(np.arange(t, t + chunk_len), end - 1)
        pieces = [Piece(rows[k], float(k == len(actions)), gamma) for k in range(t + 1, end + 1)]
        reward, discount = joined(pieces)
        before, after = ({k: v[None] for k, v in rows[at].items()} for at in (t, end))
        info = {"pieces": pieces, "stride": 1, "discount": discount}
        one = np.array([reward]), np.array([done])
        replay.add(before, after, actions[None, planned], *one, [info])


def _episodes(
    path: Path, features: VLAFeatures, number: int, instruction: str
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yield observations, T rows each, and executed actions (T, 7) of each episode of a file."""
    ends = read_success_steps(path)
    both = zip(read_episodes(path, executed=True), read_episodes(path), ends, strict=True)
    for episode, (*_, undisturbed), last in both:
        images, proprio, actions = (part[: last + 1] for part in episode)
        planned = np.arange(len(actions))[:, None] + np.arange(features.chunk_len)
        frames, made = frames_for(features.vla, images, path), []
        for first in range(0, len(actions), BATCH):
            rows = slice(first, first + BATCH)
            views = {name: frames[rows, camera] for camera, name in enumerate(CAMERAS)}
            words = [instruction] * len(proprio[rows])
            seen = views, words, proprio[rows]
            made.append(look(features.vla, features.rl_token, features.chunk_len, *seen))
        tokens, chunks = (np.concatenate(parts) for parts in zip(*made, strict=True))
        tasks = np.full(len(actions), number)
        obs = {"rl_token": tokens, "vla_action": chunks, "proprio": proprio, "task_id": tasks}
        yield {**obs, DEMONSTRATED: undisturbed[planned.clip(max=last)]}, actions
