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
from vla_gym.rollout import Info, Start, play
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.rollout.policies import BATCH_SIZE, Observations, in_episodes, in_fixed_batches
from vla_gym.suites import SUITES, get_task, suite_tasks
from vla_gym.vla import FrozenVLA
from vla_gym.vla.base import CAMERAS
from vla_gym.vla.preprocess import area_downsample
from vla_gym.vla.stateful import VLAMemory
from vla_gym_trainers.cloning.data import demo_files
from vla_gym_trainers.rl_token.vla_states import PLAYERS, StatesConfig, VLAStates, infer_hidden

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
            count = len(images)
            parts.append(
                VLAStates(
                    hidden=infer_hidden(vla, images, instruction, proprio),
                    proprio=proprio,
                    object_pos=np.full((count, 3), np.nan),
                    task=np.zeros(count, np.int64),
                    player=np.full(count, PLAYERS.index("demos")),
                    episode=np.zeros(count, np.int64),
                    tasks=[tasks.get(instruction, instruction)],
                )
            )
    return VLAStates.joined(parts)


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
        ConfigError: If no episode is asked for, or a task names no object of interest.
        WorkerError: If a worker fails again and again.
    """
    counts = {"expert": config.expert_episodes, "vla": config.rollout_episodes}
    tasks = config.tasks()
    episodes: dict[tuple[str, Start], VLAStates] = {}
    total = len(tasks) * sum(counts.values())
    hidden = not config.progress
    with tqdm(total=total, desc="states of episodes", unit="episode", disable=hidden) as bar:
        for player, count in counts.items():
            starts = [Start(t.suite, t.task_id, seed=n) for t in tasks for n in range(count)]
            policy = StatesPolicy(vla, player, config.frame_stride)
            noisy = functools.partial(
                NoisyEpisodes,
                seed=_FIRST_SEED[player] + config.seed,
                noise=config.expert_noise if player == "expert" else config.rollout_noise,
                expert=policy.expert,
            )
            for episode in play(
                policy,
                starts,
                # Half of them fill the VLA's batch while the others simulate.
                num_envs=max(2 * BATCH_SIZE, config.num_workers),
                workers=config.num_workers,
                hosts=config.hosts,
                env_wrappers=[noisy, ShowObject],
                **config.env_kwargs(),
            ):
                episodes[player, episode.start] = policy.take(episode.start)
                bar.update()
    order = [
        (player, Start(task.suite, task.task_id, seed=number))
        for task in tasks
        for player, count in counts.items()
        for number in range(count)
    ]
    return VLAStates.joined([episodes[key] for key in order])


class StatesPolicy:
    """The scripted expert or a VLA, that keeps what the VLA's hidden states are at each chunk.

    A chunk of the expert is as long as the stride from one look of the VLA to the next.
    """

    def __init__(self, vla: FrozenVLA, player: str, stride: int) -> None:
        """Choose who acts: ``"expert"``, or ``"vla"``, which looks in any case."""
        self._vla, self._player, self._vla_memory = vla, player, VLAMemory(vla)
        self.name, self.expert = player, player == "expert"
        self.chunk_len = stride if self.expert else vla.horizon
        self.cameras: tuple[str, ...] = CAMERAS
        self.image_size = vla.image_size
        self.identity: dict[str, Any] = {}
        # Hidden states (images of the expert's episodes), proprio and the object's position.
        self._seen: dict[Start, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the VLA's chunks, which the expert ignores; keep what was seen."""
        chunks = np.zeros((len(infos), self.chunk_len, 7), np.float32)

        def forward(batch: dict[str, np.ndarray], told: list[Info]) -> tuple[Any, Any]:
            images = {name: batch[name] for name in self._vla.cameras}
            texts = [info["instruction"] for info in told]
            with torch.no_grad():
                out = in_episodes(self._vla_memory, told).infer(images, texts, batch["proprio"])
            actions = out.actions.float().clamp(-1.0, 1.0).cpu().numpy()
            return actions, out.hidden.to("cpu", torch.float16).numpy()

        if self.expert:  # the VLA looks at its episodes when they end, at many frames at once
            seen = np.stack([observations[camera] for camera in CAMERAS], axis=1)
        else:
            chunks, seen = in_fixed_batches(forward, observations, infos, BATCH_SIZE)
        for row, info in enumerate(infos):
            start = Start(info["suite"], info["task_id"], info["init_state_id"], info["seed"])
            if info["elapsed_steps"] == 0:  # perhaps again, after its worker died
                self._seen[start] = []
            proprio, position = observations["proprio"][row], observations["object_pos"][row]
            self._seen[start].append((seen[row].copy(), proprio.copy(), position.copy()))
        return chunks

    def take(self, start: Start) -> VLAStates:
        """Return the states of an episode that has ended, and forget them."""
        seen, proprio, positions = zip(*self._seen.pop(start), strict=True)
        count, task = len(seen), get_task(start.suite, start.task_id)
        if self.expert:
            hidden = infer_hidden(self._vla, np.stack(seen), task.instruction, np.stack(proprio))
        else:
            hidden = torch.from_numpy(np.stack(seen))
        return VLAStates(
            hidden=hidden,
            proprio=np.stack(proprio),
            object_pos=np.stack(positions),
            task=np.zeros(count, np.int64),
            player=np.full(count, PLAYERS.index(self._player)),
            episode=np.zeros(count, np.int64),
            tasks=[task.key],
        )


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
        """Add the position; raise ConfigError if the task does not say what it is about."""
        base = self.unwrapped
        assert isinstance(base, LiberoEnv)
        sim, task = base.sim, base.task_model.task
        if not task.problem.of_interest:
            raise ConfigError(f"{task.bddl_file} names no object of interest.")
        name = task.problem.of_interest[0]
        spec = sim.task_model.objects.get(name)
        position = sim.site_pos(name) if spec is None else sim.body_pos(spec.body)
        return {**observation, "object_pos": np.array(position, np.float64)}
