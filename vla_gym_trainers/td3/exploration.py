"""Exploration noise for action chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class ChunkNoise:
    """White noise per control step plus one offset per chunk that all its steps share.

    ``eps[n, t] = level[n] * scale * (white * u[n, t] + chunk * v[n])`` with u, v standard normal;
    from chunk to chunk ``v' = rho v + sqrt(1 - rho^2) w``, w standard normal, rho `correlation`:
    at 0 each chunk draws anew, at 1 an episode keeps its offset. Since the VLA steers back, only a
    lasting offset leads it beside its way. A controller averages white noise out; the shared
    offset really moves the arm (8 steps of +0.05 are 2 cm). Both sizes are in units of the action
    scale. White noise on the gripper does nothing (the simulation takes the sign) unless the
    reference is undecided, which is where it should explore.

    ``level[n]`` is drawn uniformly from [0, 1] for each episode: how much noise a task bears
    differs by far (a rim grasp fails at half of what a placement forgives), and with a fixed size
    a delicate task would give hardly any success to learn from.
    """

    def __init__(
        self,
        chunk_len: int,
        white: float,
        chunk: float,
        scale: Sequence[float],
        seed: int | None,
        correlation: float = 0.0,
    ) -> None:
        """Set the sizes; names as above, scale (A,). The generator belongs to this noise alone."""
        self.chunk_len, self.white, self.chunk = chunk_len, white, chunk
        self.correlation = correlation
        self.scale = np.asarray(scale, np.float64)
        self.rng = np.random.default_rng(seed)
        self._levels: list[float] = []
        self._offsets: list[np.ndarray | None] = []  # of the last chunk; None: a new episode

    def end_episodes(self, env_ids: np.ndarray) -> None:
        """Draw new levels for the next episodes of environments, and forget their offsets."""
        for env in env_ids.tolist():
            self._levels[env] = float(self.rng.uniform())
            self._offsets[env] = None

    def sample(self, env_ids: np.ndarray) -> np.ndarray:
        """Return (n, C, A) float64 noise for the chunks of n environments."""
        n, size = len(env_ids), len(self.scale)
        while len(self._levels) <= max(env_ids, default=-1):
            self._levels.append(float(self.rng.uniform()))
            self._offsets.append(None)
        level = np.array([self._levels[env] for env in env_ids])[:, None, None]
        independent = self.rng.standard_normal((n, self.chunk_len, size))
        shared = self.rng.standard_normal((n, 1, size))
        for row, env in enumerate(env_ids):
            before = self._offsets[env]
            if before is not None:
                shared[row] *= np.sqrt(1.0 - self.correlation**2)
                shared[row] += self.correlation * before
            self._offsets[env] = shared[row].copy()
        return level * self.scale * (self.white * independent + self.chunk * shared)
