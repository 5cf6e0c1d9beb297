"""What a recurrent policy carries from one chunk of an episode to the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from vla_gym.rollout.policies import BATCH_SIZE, Info, Observations, in_fixed_batches

#: Names of what is carried: the recurrent state (S,), and the chunk (C, action size) that was
#: executed last, with 0 in control steps that were not.
MEMORY, PREVIOUS_ACTION = "memory", "previous_action"

#: From observations and what is carried, B rows each, and their infos, which have one instruction,
#: to chunks (B, C, action size) and the memory (B, S) after the observations, S 0 without a memory.
Forward = Callable[[dict[str, np.ndarray], list[Info]], tuple[np.ndarray, np.ndarray]]


class EpisodeMemory:
    """One row an environment; zeros at an episode's first chunk.

    Attributes:
        shapes: Shape of a row, by name; empty for a policy without memory, which carries nothing.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._rows: dict[int, dict[str, np.ndarray]] = {}

    def rows(self, env_ids: Iterable[int]) -> dict[str, np.ndarray]:
        """Return what is carried in n environments, (n, ...) float32 each; a copy."""
        ids = list(env_ids)
        sizes = {name: (len(ids), *shape) for name, shape in self.shapes.items()}
        carried = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
        for row, i in enumerate(ids):
            for name, value in self._rows.get(i, {}).items():
                carried[name][row] = value
        return carried

    def keep(self, env_ids: Iterable[int], memory: np.ndarray, chunks: np.ndarray) -> None:
        """Carry the memory (n, S) and the chunks (n, C, action size) of n environments on."""
        for i, *values in zip(env_ids, memory, chunks, strict=True):
            self._rows[i] = dict(zip((MEMORY, PREVIOUS_ACTION), map(np.copy, values), strict=True))

    def cut(self, env_ids: Iterable[int], executed: Iterable[int]) -> None:
        """Put 0 for the control steps of the last chunks behind the executed ones."""
        for i, steps in zip(env_ids, executed, strict=True):
            if i in self._rows:
                self._rows[i][PREVIOUS_ACTION][steps:] = 0.0

    def forget(self, env_ids: Iterable[int]) -> None:
        """Begin new episodes in some environments."""
        for i in env_ids:
            self._rows.pop(i, None)

    def act(
        self,
        forward: Forward,
        observations: Observations,
        infos: Sequence[Info],
        batch_size: int = BATCH_SIZE,
    ) -> np.ndarray:
        """Choose the chunks of a :class:`~vla_gym.rollout.policies.Policy`, and carry them on.

        Args:
            forward: Who chooses, in batches of one size.
            observations: n rows each.
            infos: One for each row; ``elapsed_steps`` 0 begins a new episode of ``env_id``.
            batch_size: See :func:`~vla_gym.rollout.policies.in_fixed_batches`.

        Returns:
            (n, C, action size).
        """
        ids = [info["env_id"] for info in infos]
        self.forget(info["env_id"] for info in infos if info["elapsed_steps"] == 0)
        seen = {**observations, **self.rows(ids)}
        chunks, memory = in_fixed_batches(forward, seen, infos, batch_size)
        if self.shapes:
            self.keep(ids, memory, chunks)
        return chunks
