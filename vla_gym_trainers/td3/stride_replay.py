"""Replay of transitions that begin inside chunks (RL Token, arXiv 2604.23073, stride 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vla_gym_trainers.td3.buffers import ChunkReplayBuffer
from vla_gym_trainers.td3.stride_vec_env import Piece


class Window(NamedTuple):
    """A transition of C control steps that begins inside a chunk.

    Attributes:
        start: Number of its first piece in the episode.
        obs: Observation before it.
        action: (C, 7) the actions executed from there, of two chunks.
        reward: Discounted sum inside it.
        discount: gamma ** executed_steps.
        next_obs: Observation after it.
        terminated: The episode ended in it by success.
    """

    start: int
    obs: Mapping[str, np.ndarray]
    action: np.ndarray
    reward: float
    discount: float
    next_obs: Mapping[str, np.ndarray]
    terminated: bool


class Pieces:
    """The pieces of one environment's current episode, and the windows that they make.

    A window is complete when C control steps have been executed since its beginning. At the end of
    an episode the rest of its windows are shorter; their actions are filled up with what the last
    chunk had still planned, then with its last row: none of that was executed.
    """

    def __init__(self) -> None:
        """Begin with no pieces."""
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
            self._window(j, min(j + whole, total), len(action), rest, terminated)
            for j in range(first, last)
            if not self.begins_chunk[j]
        ]

    def _window(
        self, start: int, end: int, chunk_len: int, rest: np.ndarray, terminated: bool
    ) -> Window:
        reward, discount = 0.0, 1.0
        for piece in self.pieces[start:end]:
            reward += discount * piece.reward
            discount *= piece.discount
        rows = np.concatenate([*self.actions[start:end], rest])[:chunk_len]
        missing = chunk_len - len(rows)
        action = np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])
        is_end = end == len(self.pieces) and terminated
        next_obs = self.pieces[end - 1].obs
        return Window(start, self.obs[start], action, reward, discount, next_obs, is_end)

    def returns(self) -> np.ndarray:
        """Return the Monte-Carlo return from each piece to the end, ``G_j = r_j + d_j G_(j+1)``."""
        values = np.zeros(len(self.pieces) + 1)
        for j in range(len(self.pieces) - 1, -1, -1):
            values[j] = self.pieces[j].reward + self.pieces[j].discount * values[j + 1]
        return values[:-1]


class StrideReplayBuffer(ChunkReplayBuffer):
    """A :class:`ChunkReplayBuffer` that also stores what begins inside chunks.

    Where an info has ``pieces`` and ``stride`` (see ``StrideVecEnv``), each piece after a chunk's
    first begins a transition of its own. Without, nothing is added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Allocate; see :class:`ChunkReplayBuffer`."""
        super().__init__(*args, **kwargs)
        self._running = [Pieces() for _ in range(self.n_envs)]
        self._begun: list[list[tuple[int, int]]] = [[] for _ in range(self.n_envs)]

    def reset(self) -> None:
        """Forget all transitions."""
        super().reset()
        for env in range(self.n_envs):
            self._forget(env)

    def _forget(self, env: int) -> None:
        self._running[env], self._begun[env] = Pieces(), []

    def add(  # type: ignore[override]
        self,
        obs: Mapping[str, np.ndarray],
        next_obs: Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: Sequence[Mapping[str, Any]],
    ) -> None:
        """Push one transition per environment and what begins inside; see ChunkReplayBuffer."""
        super().add(obs, next_obs, action, reward, done, infos)
        for env, info in enumerate(infos):
            pieces = info.get("pieces")
            if pieces is None:
                continue
            mine = {key: np.asarray(value[env]) for key, value in obs.items()}
            if info.get("worker_restarted", False) or not _finite(mine, action[env], pieces):
                self._forget(env)
                continue
            ended = bool(done[env])
            terminated = ended and not info.get("TimeLimit.truncated", False)
            chunk = np.reshape(action[env], (-1, self._action_width))
            windows = self._running[env].add(
                mine, chunk, pieces, int(info["stride"]), ended, terminated
            )
            for window in windows:
                self._begun[env].append((self.num_added, window.start))
                self._push_window(window)
            if ended:
                self._write_returns(env)
                self._forget(env)

    @property
    def _action_width(self) -> int:
        shape = self.action_space.shape
        assert shape is not None
        return int(shape[-1])

    def _push_window(self, window: Window) -> None:
        stage = self._ring.stage
        for key in self.obs_shape:
            stage[f"obs/{key}"][0] = np.reshape(window.obs[key], stage[f"obs/{key}"].shape[1:])
            after = np.reshape(window.next_obs[key], stage[f"next/{key}"].shape[1:])
            stage[f"next/{key}"][0] = after
        stage["actions"][0] = window.action.reshape(-1)
        stage["rewards"][0], stage["discounts"][0] = window.reward, window.discount
        stage["dones"][0], stage["mc_returns"][0] = window.terminated, np.nan
        self._push(np.array([0]))

    def _write_returns(self, env: int) -> None:
        returns = self._running[env].returns()
        oldest = self.num_added - self.buffer_size
        for number, start in self._begun[env]:
            if number >= oldest:
                self.mc_returns[number % self.buffer_size] = returns[start]


def _finite(obs: Mapping[str, np.ndarray], action: np.ndarray, pieces: Sequence[Piece]) -> bool:
    seen = [obs, *(piece.obs for piece in pieces)]
    numbers = [action, *(np.asarray(value) for one in seen for value in one.values())]
    return all(bool(np.isfinite(value).all()) for value in numbers)
