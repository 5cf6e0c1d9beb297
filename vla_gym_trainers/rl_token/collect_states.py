"""Collect a VLA's hidden states: from demonstrations in files, and from played episodes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tqdm import tqdm

from vla_gym.demos.files import read_episodes, read_instruction
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError
from vla_gym.rollout import Info, Start
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.rollout.policies import BATCH_SIZE, Observations
from vla_gym.suites import SUITES, get_task, suite_tasks
from vla_gym.vla import FrozenVLA
from vla_gym.vla.base import CAMERAS
from vla_gym.vla.preprocess import area_downsample
from vla_gym_trainers.cloning.data import demo_files
from vla_gym_trainers.rl_token.vla_states import StatesConfig, VLAStates, infer_hidden, kept_hidden
from vla_gym_trainers.rollout.episode_sets import RecordingPolicy, join_episodes, play_set

# Players see different layouts, and others than `vla-gym demos` with the same seed.
_FIRST_SEED = {"expert": 20_000, "vla": 30_000}


def states_of_demos(
    vla: FrozenVLA, folder: str | Path, stride: int, *, progress: bool = True
) -> VLAStates:
    """Let the VLA look at every ``stride``-th frame of demonstrations below a folder, or in a file.

    Raises:
        ConfigError: If there are no demonstrations, or images that are not the VLA's size nor a
            multiple of it.
    """
    tasks = {task.instruction: task.key for s in reversed(SUITES) for task in suite_tasks(s)}
    parts = []
    files = demo_files(folder)
    for path in tqdm(files, "states of demonstrations", unit="task", disable=not progress):
        instruction = read_instruction(path)
        for frames, proprio, _ in read_episodes(path):
            images, proprio = frames_for(vla, frames[::stride], path), proprio[::stride]
            hidden = infer_hidden(vla, images, instruction, proprio)
            unknown = np.full((len(images), 3), np.nan)
            name = tasks.get(instruction, instruction)
            parts.append(VLAStates.of_episode(hidden, proprio, unknown, "demos", name))
    return join_episodes(parts)


def frames_for(vla: FrozenVLA, images: np.ndarray, path: Path) -> np.ndarray:
    """Return images (T, 2, S, S, 3) of a file of demonstrations at the size that a VLA looks at.

    Raises:
        ConfigError: If their size is not the VLA's nor a multiple of it.
    """
    if images.shape[2] % vla.image_size:
        raise ConfigError(
            f"{path} has {images.shape[2]}-pixel images, the VLA looks at {vla.image_size}: record "
            f"demonstrations with 'vla-gym demos --image-size {vla.image_size}'."
        )
    return area_downsample(images, vla.image_size)


def states_of_episodes(vla: FrozenVLA, config: StatesConfig) -> VLAStates:
    """Play the episodes that the config, which was checked, asks for.

    Raises:
        ConfigError: If no episode is asked for.
        WorkerError: If a worker fails again and again.
    """
    counts = {"expert": config.expert_episodes, "vla": config.rollout_episodes}
    order = [
        (name, Start(task.suite, task.task_id, seed=number))
        for task in config.tasks()
        for name, count in counts.items()
        for number in range(count)
    ]
    return play_set(
        [StatesPolicy(vla, name, config) for name in counts],
        order,
        "states of episodes",
        progress=config.progress,
        # Half of them fill the VLA's batch while the others simulate.
        num_envs=max(2 * BATCH_SIZE, config.num_workers),
        workers=config.num_workers,
        hosts=config.hosts,
        **config.env_kwargs(),
    )


class StatesPolicy(RecordingPolicy):
    """The scripted expert or a VLA, that keeps what the VLA's hidden states are at each chunk.

    A chunk of the expert is as long as the stride from one look of the VLA to the next.
    """

    def __init__(self, vla: FrozenVLA, name: str, config: StatesConfig) -> None:
        """Choose who acts: ``"expert"``, or ``"vla"``, which looks in any case."""
        is_expert = name == "expert"
        noisy = functools.partial(
            NoisyEpisodes,
            seed=_FIRST_SEED[name] + config.seed,
            noise=config.expert_noise if is_expert else config.rollout_noise,
            expert=is_expert,
        )
        chunk_len = config.frame_stride if is_expert else vla.horizon
        super().__init__(vla, name, chunk_len, CAMERAS, noisy, ShowObject)

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the VLA's chunks, which the expert ignores; keep what was seen."""
        if self.expert:  # the VLA looks at its episodes when they end, at many frames at once
            chunks = np.zeros((len(infos), self.chunk_len, 7), np.float32)
            seen = np.stack([observations[camera] for camera in CAMERAS], axis=1)
        else:
            chunks, seen = self.look(observations, infos, functools.partial(kept_hidden, self.vla))
        shown = {name: observations[name] for name in ("proprio", "object_pos")}
        self.keep(infos, seen=seen, **shown)
        return chunks

    def take(self, start: Start) -> VLAStates:
        """Return the states of an episode that has ended, and forget them."""
        rows, task = self.kept(start), get_task(start.suite, start.task_id)
        seen, proprio = rows["seen"], rows["proprio"]
        hidden = torch.from_numpy(seen)
        if self.expert:
            hidden = infer_hidden(self.vla, seen, task.instruction, proprio)
        return VLAStates.of_episode(hidden, proprio, rows["object_pos"], self.name, task.key)


class ShowObject(gym.ObservationWrapper[dict[str, Any], np.ndarray, dict[str, Any]]):
    """Adds ``object_pos`` (3,) float64: where the first thing is that the task is about.

    In metres, in the world frame; an object's body, or a region's site.
    """

    def __init__(self, env: gym.Env[dict[str, Any], np.ndarray]) -> None:
        """Wrap an environment around a ``LiberoEnv``."""
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        place = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = spaces.Dict({**env.observation_space.spaces, "object_pos": place})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Add the position, NaN if the task does not say what it is about."""
        base = self.unwrapped
        assert isinstance(base, LiberoEnv)
        sim, task = base.sim, base.task_model.task
        if not task.problem.of_interest:
            return {**observation, "object_pos": np.full(3, np.nan)}
        name = task.problem.of_interest[0]
        spec = sim.task_model.objects.get(name)
        position = sim.site_pos(name) if spec is None else sim.body_pos(spec.body)
        return {**observation, "object_pos": np.array(position, np.float64)}
