"""Which steps a batch of truncated backpropagation through time is made of, and where it starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.losses import Window


class Windows:
    """Draws windows of T steps from sequences, with the state before each.

    Sequential: each of B streams goes through a random episode from window to window, then through
    the next one. A stream's state is carried from window to window, and zero where an episode
    begins. Else: windows are drawn at random, and start from the state that the last window which
    reached that step left there: a stored state, of older weights the longer ago that was; it is
    zero until a window has come by, and where an episode begins.

    Attributes:
        episodes: Episodes that were begun (sequential), or windows that were drawn.
    """

    def __init__(
        self,
        data: Sequences,
        length: int,
        batch_size: int,
        state_size: int,
        seed: int,
        *,
        sequential: bool,
    ) -> None:
        """Begin: batches of B windows of ``length`` T steps; see :func:`check_length`.

        The sequences have tokens.
        """
        self._data, self._length, self._size = data, length, batch_size
        bounds = data.bounds()
        self._bounds = bounds[np.diff(bounds)[:, 0] > 1]
        self._sequential, self._rng = sequential, np.random.default_rng(seed)
        self._last = data.last_actions()
        self._state = torch.zeros(batch_size, state_size)
        self._row = np.zeros(batch_size, np.int64)  # where each stream's next window begins
        self._end = np.zeros(batch_size, np.int64)  # after the last step with a next one
        self._stored = torch.zeros(0 if sequential else len(data), state_size)
        self._rows = np.zeros((0, 0), np.int64)
        self.episodes = 0

    def next(self) -> tuple[Window, Tensor]:
        """Return the next batch, and the states (B, S) before its windows."""
        if self._sequential:
            self._begin_episodes()
        else:
            self._draw()
        steps = self._row[:, None] + np.arange(self._length)
        valid = steps < self._end[:, None]
        rows = self._rows = np.where(valid, steps, self._end[:, None] - 1)
        data = self._data
        arrays = (
            data.features[rows],
            data.proprio[rows],
            data.tokens[rows],
            self._last[rows],
            data.actions[rows],
            data.tokens[rows + 1],
            valid & (data.executed[rows] > 0),
        )
        window = Window(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
        return window, self._state

    def _begin_episodes(self) -> None:
        """Give streams whose episode is over another one."""
        for stream in np.flatnonzero(self._row >= self._end).tolist():
            first, end = self._bounds[self._rng.integers(len(self._bounds))]
            self._row[stream], self._end[stream] = first, end - 1
            self._state[stream] = 0.0
            self.episodes += 1

    def _draw(self) -> None:
        """Draw windows: episodes by their length, then a place; stored states come along."""
        starts = np.maximum(np.diff(self._bounds)[:, 0] - self._length, 1)
        picks = self._rng.integers(starts.sum(), size=self._size)
        episode = np.searchsorted(np.cumsum(starts), picks, side="right")
        offset = picks - (np.cumsum(starts) - starts)[episode]
        self._row = self._bounds[episode, 0] + offset
        self._end = self._bounds[episode, 1] - 1
        self._state = self._stored[torch.from_numpy(self._row)]

    def store(self, states: Tensor) -> None:
        """Take the states (N, S) after all rows in the place of the stored ones."""
        self._stored = torch.zeros_like(states)
        self._stored[1:] = states[:-1]
        self._stored[torch.from_numpy(self._data.bounds()[:, 0])] = 0.0

    def keep(self, states: Tensor) -> None:
        """Take the states (B, T, S) after the steps of the last batch."""
        states = states.cpu()
        if self._sequential:
            self._state = states[:, -1].clone()
            self._row += self._length
            return
        # The state after step t is the one before step t + 1. (None begins at an episode's last
        # row, where those of masked steps go.)
        self._stored[torch.from_numpy(self._rows + 1)] = states
        self.episodes += self._size

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a resumed run needs: plain data and tensors."""
        plain = {
            "rng": self._rng.bit_generator.state,
            "row": self._row.tolist(),
            "end": self._end.tolist(),
            "episodes": self.episodes,
        }
        return plain, {"state": self._state, "stored": self._stored}

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` returned."""
        self._rng.bit_generator.state = plain["rng"]
        self._row, self._end = np.array(plain["row"]), np.array(plain["end"])
        self.episodes = plain["episodes"]
        self._state, self._stored = tensors["state"].clone(), tensors["stored"].clone()


def check_length(data: Sequences, length: int) -> None:
    """Check that a sequence is as long as a window.

    Raises:
        ConfigError: If none has ``length`` steps with a next one.
    """
    longest = int(np.diff(data.bounds()).max(initial=0))
    if longest < length + 1:
        raise ConfigError(
            f"Expected sequences of at least bptt_length={length} steps and one more, the longest "
            f"has {longest}: lower bptt_length (world_bptt_length in phase 3) or chunk_len."
        )
