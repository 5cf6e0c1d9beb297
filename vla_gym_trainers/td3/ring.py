"""A preallocated ring of rows with named columns, and where each task's rows are in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class ChunkReplaySamples(NamedTuple):
    """A batch of B transitions; SB3's names, so that stock TD3 can read it too.

    Attributes:
        observations: Key -> (B, ...) float32 (Discrete keys: (B, 1) int64).
        actions: (B, C * 7) executed chunks.
        next_observations: Like ``observations``; at an episode's end its real last observation.
        dones: (B, 1) 1.0 where the episode terminated; 0.0 at a time limit.
        rewards: (B, 1) discounted sum of rewards inside the chunk.
        discounts: (B, 1) ``gamma ** executed_steps``.
        mc_returns: (B, 1) discounted return to the episode's end, NaN while it is unknown.
    """

    observations: dict[str, Tensor]
    actions: Tensor
    next_observations: dict[str, Tensor]
    dones: Tensor
    rewards: Tensor
    discounts: Tensor
    mc_returns: Tensor


class Ring:
    """The newest ``capacity`` rows, all columns side by side in one float32 matrix.

    So a batch is one gather and a push one copy. Row number r (counted from the first push) is in
    slot ``r % capacity``. Pickling keeps the filled rows only.

    Attributes:
        views: Column -> (capacity, *shape) view of the matrix.
        staged: (max_push, width) rows that the next push takes.
        stage: Column -> (max_push, *shape) view of them.
        num_added: Rows pushed in all.
    """

    def __init__(self, capacity: int, shapes: Mapping[str, tuple[int, ...]], max_push: int) -> None:
        """Allocate everything.

        Args:
            capacity: Slots.
            shapes: Shape of one row of each column.
            max_push: Largest number of rows of one push.
        """
        self.capacity, self.max_push, self.num_added = capacity, max_push, 0
        self.shapes = dict(shapes)
        self.places: dict[str, slice] = {}
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + int(np.prod(shape, dtype=np.int64))
            self.places[name] = slice(start, end)
        self._width = end
        self._allocate()

    def _allocate(self) -> None:
        self._matrix = np.zeros((self.capacity, self._width), np.float32)
        self.staged = np.zeros((self.max_push, self._width), np.float32)
        self.views, self.stage = self._views(self._matrix), self._views(self.staged)

    def _views(self, matrix: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: matrix[:, place].reshape(len(matrix), *self.shapes[name])  # always a view
            for name, place in self.places.items()
        }

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def push(self, rows: np.ndarray) -> np.ndarray:
        """Copy staged rows (n,) into the ring, over the oldest ones; return their slots (n,)."""
        slots = np.arange(self.num_added, self.num_added + len(rows)) % self.capacity
        self._matrix[slots] = self.staged[rows]
        self.num_added += len(rows)
        return slots

    def gather(self, slots: np.ndarray, device: torch.device) -> dict[str, Tensor]:
        """Return the rows in (B,) slots by column, (B, *shape); a number gives (B, 1)."""
        # Torch's gather: NumPy's maps fresh memory for each large result, which costs more than
        # the copy itself.
        rows = torch.from_numpy(self._matrix).index_select(0, torch.from_numpy(slots)).to(device)
        batch = {name: rows[:, place] for name, place in self.places.items()}
        for name, shape in self.shapes.items():
            if len(shape) > 1:
                batch[name] = batch[name].unflatten(1, shape)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        derived = ("views", "stage", "staged")
        state = {key: value for key, value in vars(self).items() if key not in derived}
        return {**state, "_matrix": self._matrix[: len(self)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        filled = state.pop("_matrix")
        vars(self).update(state)
        self._allocate()
        self._matrix[: len(filled)] = filled


class TaskIndex:
    """The slots of each task, so that a draw from one task is O(1).

    A slot enters its task's list at the end and leaves it by taking the last one into its place:
    pushing and overwriting are O(1), and memory is one number a slot, lists growing by doubling.
    The order of the lists decides what a draw returns, so it is a part of what is pickled.
    """

    def __init__(self, capacity: int) -> None:
        """Begin with all slots empty."""
        self._task = np.full(capacity, -1, np.int64)
        self._place = np.zeros(capacity, np.int64)
        self._lists: dict[int, np.ndarray] = {}
        self._counts: dict[int, int] = {}

    @property
    def counts(self) -> dict[int, int]:
        """Rows by task, ascending by task; tasks without any are left out."""
        return {task: n for task, n in sorted(self._counts.items()) if n}

    def put(self, slot: int, task: int) -> None:
        """Note that a slot now holds a row of ``task``, whatever it held."""
        old = int(self._task[slot])
        if old == task:
            return
        if old >= 0:
            self._counts[old] -= 1
            members, hole = self._lists[old], self._place[slot]
            last = members[self._counts[old]]
            members[hole], self._place[last] = last, hole
        count = self._counts.get(task, 0)
        members = self._lists.setdefault(task, np.zeros(64, np.int64))
        if count == len(members):
            members = self._lists[task] = np.concatenate([members, np.zeros_like(members)])
        members[count] = slot
        self._task[slot], self._place[slot] = task, count
        self._counts[task] = count + 1

    def sample(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (size,) slots, as many of each task (the remainder to tasks drawn at random).

        With replacement inside a task; ``size`` must be positive and some slot filled.
        """
        tasks = list(self.counts)
        shares = np.full(len(tasks), size // len(tasks))
        shares[rng.permutation(len(tasks))[: size % len(tasks)]] += 1
        drawn = [
            self._lists[task][rng.integers(self._counts[task], size=share)]
            for task, share in zip(tasks, shares.tolist(), strict=True)
        ]
        return np.concatenate(drawn)
