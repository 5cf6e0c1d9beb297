"""The fixed actions that every system plays."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from vla_gym.errors import ConfigError

#: Small enough that neither a task is solved nor the arm leaves its workspace between two resets.
AMPLITUDE = 0.6
_STEPS = 512


class FixedActions:
    """Actions of any number of environments; those of one do not depend on how many there are.

    Attributes:
        source: Where they come from.
        sha256: Digest of the first environment's actions.
    """

    def __init__(self, seed: int, file: Path | None = None) -> None:
        """Generate uniform actions, or read a file.

        Args:
            seed: Seed of the generated ones.
            file: .npz with an array ``actions``, (N, T, 7) or (T, 7) in [-1, 1].

        Raises:
            ConfigError: If the file is not as described.
        """
        self._seed = seed
        self._from_file = None if file is None else _read(file)
        self.source = f"uniform +-{AMPLITUDE}, seed {seed}" if file is None else file.name
        first = self._rows(0)
        self.sha256 = hashlib.sha256(first.tobytes()).hexdigest()

    def _rows(self, index: int) -> np.ndarray:
        if self._from_file is not None:
            return self._from_file[index % len(self._from_file)]
        rng = np.random.default_rng([self._seed, index])
        return rng.uniform(-AMPLITUDE, AMPLITUDE, (_STEPS, 7)).astype(np.float32)

    def batch(self, num_envs: int, steps: int) -> np.ndarray:
        """Return (num_envs, steps, 7) float32; what is too short starts over."""
        rows = np.stack([self._rows(i) for i in range(num_envs)])
        return np.ascontiguousarray(rows[:, np.arange(steps) % rows.shape[1]])


def _read(file: Path) -> np.ndarray:
    try:
        with np.load(file, allow_pickle=False) as content:
            actions = np.asarray(content["actions"], np.float32)
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{file}: expected an .npz file with an array 'actions' ({error})."
        ) from error
    actions = actions[None] if actions.ndim == 2 else actions
    if actions.ndim != 3 or actions.shape[2] != 7 or actions.size == 0:
        raise ConfigError(f"{file}: 'actions' must be (N, T, 7) or (T, 7), got {actions.shape}.")
    if not (np.abs(actions) <= 1.0).all():
        raise ConfigError(f"{file}: 'actions' must be finite and in [-1, 1].")
    return actions
