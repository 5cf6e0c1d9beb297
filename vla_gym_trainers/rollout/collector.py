"""The one loop that collects: receive, give to who plays, act for those that go on, send."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from vla_gym_trainers.rollout.chunks import ChunkStep, Observation


class Running(Protocol):
    """Chunks under way."""

    def recv(self) -> ChunkStep | None:
        """Wait; None if a piece of the chunks has ended and the next one has begun."""


class Envs(Protocol):
    """Environments that a collector steps; they need not be on this machine."""

    num_envs: int

    def groups(self, count: int) -> list[np.ndarray]:
        """Split the environments into groups that can be stepped by turns; return their numbers."""

    def reset(self) -> Any:
        """Begin an episode in each; return the observations."""

    def begin(self, actions: np.ndarray, env_ids: np.ndarray) -> Running:
        """Begin a chunk in each of some environments."""


class Player(Protocol):
    """Who acts, where it goes what was played, and when an environment stops."""

    def act(self, obs: Observation, env_ids: np.ndarray) -> np.ndarray:
        """Return chunks (n, C, 7) for the observations of n environments."""

    def take(self, env_ids: np.ndarray, step: ChunkStep) -> np.ndarray:
        """Store what the chunks led to; return (n,) bool: the environments that go on."""


class Collector:
    """Steps groups of environments by turns: while one simulates, the VLA works for another.

    The groups are fixed and take turns in a fixed order, so nothing depends on timing. All
    environments are reset and stepped in the thread that collects (a renderer belongs to the
    thread that made it).

    Attributes:
        envs: The environments.
        obs: What is acted on next, of all of them, changed in place; empty resets them first.
    """

    def __init__(self, envs: Envs, groups: int, obs: Observation) -> None:
        """Take over environments, in so many groups; for ``obs`` see the class.

        Raises:
            ConfigError: If they cannot be split into groups.
        """
        self.envs, self.obs = envs, obs
        self.num_envs, self._groups = envs.num_envs, envs.groups(groups)

    def collect(self, player: Player) -> None:
        """Play until ``player`` lets no environment go on."""
        if not self.obs:
            self.obs.update(self.envs.reset())
        turns = deque((ids, self._begin(player, ids)) for ids in self._groups)
        while turns:
            ids, running = turns.popleft()
            step = running.recv()
            if step is not None:
                for key, value in step.obs.items():
                    self.obs[key][ids] = value
                ids = ids[player.take(ids, step)]
                if not len(ids):
                    continue
                running = self._begin(player, ids)
            turns.append((ids, running))

    def _begin(self, player: Player, ids: np.ndarray) -> Running:
        obs = {key: value[ids] for key, value in self.obs.items()}
        return self.envs.begin(player.act(obs, ids), ids)


class Stopwatch:
    """Adds up the seconds of named parts of a run; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what happens in the context, an exception included."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - began)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        with self._lock:
            self._seconds[part] += seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds of every part since the last call, and begin anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)
