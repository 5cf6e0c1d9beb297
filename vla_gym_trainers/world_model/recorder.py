"""Keeps what a world model's memory has taken in, as sequences to learn from.

Nothing is computed for it: features and tokens are those that the memory was updated with. A row
is an observation, the one that ends an episode included.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vla_gym_trainers.world_model.data import BEHAVIOURS, Sequences

Row = dict[str, np.ndarray]


class StepRecorder:
    """Episodes of N environments as they are played, without pictures."""

    def __init__(self, chunk_len: int) -> None:
        """Begin with none.

        Args:
            chunk_len: Control steps of a step.
        """
        self._chunk_len = chunk_len
        self._running: dict[int, list[Row]] = {}
        self._over: list[list[Row]] = []

    def take(self, stepped: np.ndarray, begun: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Keep rows; an episode is over where another one begins.

        Args:
            stepped: (n,) as in :meth:`.memory.WorldMemory.advance`.
            begun: (m,) as there.
            rows: ``features``, ``tokens``, ``proprio`` and ``actions`` of n + m rows.
        """
        for row, i in enumerate(stepped.tolist()):
            self._running[i][-1]["actions"] = rows["actions"][row].copy()
            self._running[i].append(self._row(rows, row))
        for row, i in enumerate(begun.tolist(), len(stepped)):
            self._over.append(self._running.pop(i, []))
            self._running[i] = [self._row(rows, row)]

    def _row(self, rows: Mapping[str, np.ndarray], row: int) -> Row:
        kept = {name: rows[name][row].copy() for name in ("features", "tokens", "proprio")}
        return {**kept, "actions": np.zeros_like(rows["actions"][row])}

    def pop(self) -> Sequences | None:
        """Return the episodes that are over and forget them; None if none has a step.

        One in which a number is not finite is left out: a model would learn nothing else any more.
        """
        over = [episode for episode in self._over if len(episode) > 1 and _is_finite(episode)]
        self._over = []
        if not over:
            return None
        rows = [row for episode in over for row in episode]
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        lengths, nothing = [len(episode) for episode in over], np.zeros(len(rows), np.int64)
        chunks = columns["actions"].reshape(len(rows), self._chunk_len, -1)
        # Control steps that were not executed are 0; so may others be, but hardly a whole chunk.
        executed = np.maximum((chunks != 0.0).any(axis=2).sum(axis=1), 1)
        executed[np.cumsum(lengths) - 1] = 0
        return Sequences(
            **columns,
            frames=np.zeros((0, 1, 1, 3), np.uint8),
            agentview=np.zeros((0, 1, 1, 3), np.uint8),
            executed=executed.astype(np.int64),
            episode=np.repeat(np.arange(len(over)), lengths),
            behaviour=np.full(len(rows), BEHAVIOURS.index("explorer")),
            task=nothing,
            objects=np.full((len(rows), 0, 3), np.nan, np.float32),
            tasks=[""],
        )


def _is_finite(episode: list[Row]) -> bool:
    return all(bool(np.isfinite(value).all()) for row in episode for value in row.values())
