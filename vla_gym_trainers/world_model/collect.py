"""Collect sequences for a world model: episodes of each behaviour on sampled layouts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.rollout import Info, Policy, Start
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.rollout.policies import Observations, episode_key
from vla_gym.suites import get_suite, get_task
from vla_gym.suites.protocol import ActionSpec
from vla_gym.vla import FrozenVLA
from vla_gym.vla.base import CAMERAS
from vla_gym.vla.preprocess import area_downsample
from vla_gym_trainers.rollout.episode_sets import RecordingPolicy, play_set
from vla_gym_trainers.runs.settings import EVAL_SEED
from vla_gym_trainers.world_model.config import WorldModelConfig
from vla_gym_trainers.world_model.data import BEHAVIOURS, Sequences

#: Each behaviour sees layouts of its own, and others than the RL token's with the same seed.
FIRST_SEED = {"random": 40_000, "vla": 50_000, "expert": 60_000, "explorer": 70_000}
#: Side of the frames that a world model predicts, in pixels.
FRAME_SIZE = 64
#: Movable objects of a scene whose positions are recorded, at most.
MAX_OBJECTS = 16
#: Control steps from one random point to the next.
RANDOM_PERIOD = 24
#: Largest random action in units of its natural size, before it is clipped.
RANDOM_SIZE = 1.5


def collect(
    vla: FrozenVLA,
    config: WorldModelConfig,
    counts: dict[str, int],
    *,
    held_out: bool = False,
    explorer: Policy | None = None,
) -> Sequences:
    """Play episodes and keep what a world model learns from.

    An episode is a function of the seed, the task, its behaviour and its number alone: not of the
    worker count, nor of how many others are played.

    Args:
        vla: Looks at all episodes, and acts in its own.
        config: Tasks, chunks, noise, workers and world.
        counts: Episodes a task by behaviour.
        held_out: Play other layouts, which no training episode of any seed begins in, and keep the
            main camera's frames for pictures.
        explorer: Who plays the explorer's episodes. With one, episode n of a task begins in the
            same layout whoever plays it.

    Raises:
        WorkerError: If a worker fails again and again.
    """
    base = config.seed + (EVAL_SEED if held_out else 0)
    order = [
        (name, Start(task.suite, task.task_id, seed=number))
        for name in BEHAVIOURS
        for task in config.tasks()
        for number in range(counts.get(name, 0))
    ]
    return play_set(
        [SequencePolicy(vla, name, config, base, held_out, explorer) for name in BEHAVIOURS],
        order,
        f"{'validation' if held_out else 'training'} episodes",
        progress=config.progress,
        num_envs=config.num_envs,
        workers=config.num_workers,
        hosts=config.hosts,
        **config.env_kwargs(),
    )


class SequencePolicy(RecordingPolicy):
    """Acts as one of the behaviours and keeps what is seen at every step."""

    def __init__(
        self,
        vla: FrozenVLA,
        behaviour: str,
        config: WorldModelConfig,
        seed: int,
        keep_agentview: bool,
        explorer: Policy | None,
    ) -> None:
        """Choose who acts; the VLA looks in any case. All that is drawn depends on the seed."""
        self._seed, self._explorer, self._keep_agentview = seed, explorer, keep_agentview
        record = functools.partial(
            RecordedEpisodes,
            seed=FIRST_SEED[behaviour if explorer is None else "explorer"] + seed,
            noise=0.0 if behaviour == "random" else config.noise,
            expert=behaviour == "expert",
            chunk_len=config.chunk_len,
        )
        cameras = tuple(dict.fromkeys((*vla.cameras, *CAMERAS)))
        super().__init__(vla, behaviour, config.chunk_len, cameras, record)

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the behaviour's chunks (the expert ignores them); keep what was seen."""
        chunks, features = self.look(observations, infos, lambda x: x.mean(dim=1).float())
        if self.name == "random":
            chunks = np.stack([random_chunk(self._seed, info, self.chunk_len) for info in infos])
        elif self.name == "explorer":
            assert self._explorer is not None
            chunks = self._explorer.act(observations, infos)
        seen = {key: observations[key] for key in ("proprio", "executed", "objects")}
        views = {"frames": "wrist"} | ({"agentview": "agentview"} if self._keep_agentview else {})
        seen |= {k: area_downsample(observations[view], FRAME_SIZE) for k, view in views.items()}
        elapsed = np.array([info["elapsed_steps"] for info in infos], np.int64)
        self.keep(infos, features=features, elapsed=elapsed, **seen)
        return chunks

    def take(self, start: Start) -> Sequences:
        """Return an episode that has ended, and forget it."""
        rows = self.kept(start)
        elapsed, actions = rows.pop("elapsed"), rows.pop("executed")
        count = len(elapsed)
        actions = np.roll(actions.reshape(count, -1), -1, axis=0)  # the first row had none before
        rows.setdefault("agentview", np.zeros((0, FRAME_SIZE, FRAME_SIZE, 3), np.uint8))
        return Sequences(
            **rows,
            actions=actions,
            executed=np.diff(elapsed, append=elapsed[-1]),
            episode=np.zeros(count, np.int64),
            behaviour=np.full(count, BEHAVIOURS.index(self.name)),
            task=np.zeros(count, np.int64),
            tokens=np.zeros((0, 0), np.int64),
            tasks=[get_task(start.suite, start.task_id).key],
        )


def random_chunk(seed: int, info: Info, chunk_len: int) -> np.ndarray:
    """Return smooth random actions (C, A) that lead from one random point to the next.

    Points of the unit cube are visited one after the other, each within :data:`RANDOM_PERIOD`
    control steps, so the actions are constant for a while and their sum stays bounded: the arm
    wanders about where it began and comes back to what it has seen. The gripper's command is -1
    or 1 for as long. All is a function of the seed, the start and the control step.
    """
    action = get_suite(info["suite"]).action
    legs = [(info["elapsed_steps"] + step) // RANDOM_PERIOD for step in range(chunk_len)]
    points = {leg: _random_point(seed, info, leg, action) for leg in range(legs[0], legs[-1] + 2)}
    scale = RANDOM_SIZE * np.array(action.scales)
    chunk = np.stack([scale * (points[leg + 1] - points[leg]) / 2.0 for leg in legs])
    for column, name in enumerate(action.names):
        if name == "gripper":
            chunk[:, column] = [1.0 if points[leg][column] > 0.0 else -1.0 for leg in legs]
    return np.clip(chunk, action.low, action.high).astype(np.float32)


def _random_point(seed: int, info: Info, leg: int, action: ActionSpec) -> np.ndarray:
    if leg == 0:
        return np.zeros(action.size)  # where the arm begins
    there: Info = {**info, "elapsed_steps": leg}
    return np.random.default_rng(episode_key(seed, there)).uniform(-1.0, 1.0, action.size)


class RecordedEpisodes(NoisyEpisodes):
    """Noisy episodes whose observations also tell what was executed and where objects are.

    ``executed``: (C, A) float32, the actions of the last step as they were executed, 0 for control
    steps that were not; ``objects``: (:data:`MAX_OBJECTS`, 3) float32, as in
    :class:`.data.Sequences`.
    """

    def __init__(
        self, env: gym.Env[dict[str, Any], np.ndarray], *, chunk_len: int, **noise: Any
    ) -> None:
        """Wrap an environment around a ``LiberoEnv``; for the noise see the base."""
        super().__init__(env, **noise)
        assert isinstance(env.observation_space, spaces.Dict)
        size = get_suite(self._base.suite).action.size
        self._executed = np.zeros((chunk_len, size), np.float32)
        self._count = 0
        everything = functools.partial(spaces.Box, -np.inf, np.inf, dtype=np.float32)
        self.observation_space = spaces.Dict(
            {
                **env.observation_space.spaces,
                "executed": everything(shape=self._executed.shape),
                "objects": everything(shape=(MAX_OBJECTS, 3)),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start episode number ``seed`` of the task that the options name."""
        obs, info = super().reset(seed=seed, options=options)
        self._executed[:] = 0.0
        return self._with_record(obs), info

    def on_action(self, action: np.ndarray, executed: np.ndarray) -> None:
        """Keep what is executed."""
        del action
        self._executed[self._count] = executed
        self._count += 1

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Execute a chunk."""
        self._executed[:], self._count = 0.0, 0
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with_record(obs), reward, terminated, truncated, info

    def _with_record(self, obs: dict[str, Any]) -> dict[str, Any]:
        return {**obs, "executed": self._executed.copy(), "objects": self._objects()}

    def _objects(self) -> np.ndarray:
        sim: Any = self._base.sim
        objects = np.full((MAX_OBJECTS, 3), np.nan, np.float32)
        specs = getattr(sim.task_model, "objects", {})  # of LIBERO's suites
        bodies = [spec.body for spec in specs.values() if not spec.is_fixture][:MAX_OBJECTS]
        for row, body in enumerate(bodies):
            objects[row] = sim.body_pos(body)
        return objects
