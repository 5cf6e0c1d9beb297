"""Transitions that begin inside chunks (RL Token, arXiv 2604.23073, stride 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vla_gym_trainers.rollout.chunks import Piece, joined


class Window(NamedTuple):
    """A transition of C control steps that begins inside a chunk.

    Attributes:
        start: Number of its first piece in the episode.
        obs: Observation before it.
        next_obs: Observation after it.
        action: (C, 7) the actions executed from there, of two chunks.
        reward: Discounted sum inside it.
        terminated: The episode ended in it by success.
        discount: gamma ** executed_steps.
        truncated: The episode ended in it by the step limit.
    """

    start: int
    obs: Mapping[str, np.ndarray]
    next_obs: Mapping[str, np.ndarray]
    action: np.ndarray
    reward: float
    terminated: bool
    discount: float
    truncated: bool


class Pieces:
    """The pieces of one environment's current episode, and the windows that they make.

    A window is complete when C control steps have been executed since its beginning. At the end of
    an episode the rest of its windows are shorter; their actions are filled up with what the last
    chunk had still planned, then with its last row: none of that was executed.
    """

    def __init__(self) -> None:
        self.obs: list[Mapping[str, np.ndarray]] = []
        self.actions: list[np.ndarray] = []
        self.pieces: list[Piece] = []
        self.begins_chunk: list[bool] = []

    def add(
        self,
        obs: Mapping[str, np.ndarray],
        action: np.ndarray,
        pieces: Sequence[Piece],
        stride: int,
        done: bool,
        terminated: bool,
    ) -> list[Window]:
        """Append the pieces of a chunk; return the windows that it completes.

        Args:
            obs: Observation before the chunk.
            action: (C, 7) the chunk.
            pieces: Those that were executed: C / stride, or fewer at the end of an episode.
            stride: Control steps of a piece.
            done: The episode ended with the last piece.
            terminated: It ended by success.
        """
        before, whole = len(self.pieces), len(action) // stride
        for k, piece in enumerate(pieces):
            self.obs.append(pieces[k - 1].obs if k else obs)
            self.actions.append(action[k * stride : (k + 1) * stride])
            self.pieces.append(piece)
            self.begins_chunk.append(k == 0)
        total = len(self.pieces)
        rest = action[len(pieces) * stride :]
        first = max(0, before - whole + 1)
        last = total if done else total - whole + 1
        return [
            self._window(j, min(j + whole, total), len(action), rest, done, terminated)
            for j in range(first, last)
            if not self.begins_chunk[j]
        ]

    def _window(
        self,
        start: int,
        end: int,
        chunk_len: int,
        rest: np.ndarray,
        done: bool,
        terminated: bool,
    ) -> Window:
        reward, discount = joined(self.pieces[start:end])
        rows = np.concatenate([*self.actions[start:end], rest])[:chunk_len]
        missing = chunk_len - len(rows)
        action = np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])
        is_last = end == len(self.pieces)
        won, cut = is_last and terminated, is_last and done and not terminated
        next_obs = self.pieces[end - 1].obs
        return Window(start, self.obs[start], next_obs, action, reward, won, discount, cut)

    def returns(self) -> np.ndarray:
        """Return the Monte-Carlo return from each piece to the end, ``G_j = r_j + d_j G_(j+1)``."""
        values = np.zeros(len(self.pieces) + 1)
        for j in range(len(self.pieces) - 1, -1, -1):
            values[j] = self.pieces[j].reward + self.pieces[j].discount * values[j + 1]
        return values[:-1]
