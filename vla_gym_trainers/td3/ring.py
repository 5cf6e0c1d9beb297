"""A preallocated ring of rows with named columns, and draws by task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Observed in a replay of demonstrations alone: the chunk that the expert would have done.
DEMONSTRATED = "demonstrated"


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
        demonstrated: (B, C * 7) in transitions of demonstrations what the expert would have done,
            without the noise of ``actions``; else NaN.
    """

    observations: dict[str, Tensor]
    actions: Tensor
    next_observations: dict[str, Tensor]
    dones: Tensor
    rewards: Tensor
    discounts: Tensor
    mc_returns: Tensor
    demonstrated: Tensor

    def joined(self, other: ChunkReplaySamples) -> ChunkReplaySamples:
        """Return this batch and another one below it, which may observe more."""

        def both(mine: Any, theirs: Any) -> Any:
            if isinstance(mine, dict):
                return {key: torch.cat([mine[key], theirs[key]]) for key in mine}
            return torch.cat([mine, theirs])

        return ChunkReplaySamples(*map(both, self, other))


class Ring:
    """The newest ``capacity`` rows, all columns side by side in one float32 matrix.

    So a batch is one gather and a push one copy. Row number r (counted from the first push) is in
    slot ``r % capacity``. Pickling keeps the filled rows only.

    Attributes:
        views: Column -> (capacity, *shape) view of the matrix.
        num_added: Rows pushed in all.
    """

    def __init__(self, capacity: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate ``capacity`` rows; ``shapes`` has the shape of one row of each column."""
        self.capacity, self.num_added, self.shapes = capacity, 0, dict(shapes)
        self._allocate()

    def _allocate(self) -> None:
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes.values())]).tolist()
        self._places = dict(zip(self.shapes, map(slice, ends[:-1], ends[1:]), strict=True))
        self._matrix = np.zeros((self.capacity, ends[-1]), np.float32)
        self.views = {
            name: self._matrix[:, place].reshape(self.capacity, *self.shapes[name])  # views
            for name, place in self._places.items()
        }

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def pack(self, columns: Mapping[str, Any], count: int) -> np.ndarray:
        """Return columns (count, *shape), in any shape with as many numbers, as rows to push."""
        parts = [np.reshape(columns[name], (count, -1)) for name in self.shapes]
        return np.concatenate(parts, axis=1, dtype=np.float32)

    def push(self, rows: np.ndarray) -> None:
        """Copy packed rows (n, width) into the ring, over the oldest ones."""
        slots = np.arange(self.num_added, self.num_added + len(rows)) % self.capacity
        self._matrix[slots] = rows
        self.num_added += len(rows)

    def overwritten(self, count: int) -> np.ndarray:
        """Return the rows (m, width), m <= count, in whose place the next ``count`` will be put."""
        first = max(self.num_added, self.capacity)
        return self._matrix[np.arange(first, self.num_added + count) % self.capacity]

    def column(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Return the numbers of one column in packed rows (n, width), flat."""
        return rows[:, self._places[name]].reshape(-1)

    def gather(self, slots: np.ndarray, device: torch.device) -> dict[str, Tensor]:
        """Return the rows in (B,) slots by column, (B, *shape); a number gives (B, 1)."""
        # Torch's gather: NumPy's maps fresh memory for each large result, which costs more than
        # the copy itself.
        rows = torch.from_numpy(self._matrix).index_select(0, torch.from_numpy(slots)).to(device)
        batch = {name: rows[:, place] for name, place in self._places.items()}
        for name, shape in self.shapes.items():
            if len(shape) > 1:
                batch[name] = batch[name].unflatten(1, shape)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("capacity", "num_added", "shapes")}
        return {**state, "_matrix": self._matrix[: len(self)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.capacity, self.num_added = state["capacity"], state["num_added"]
        self.shapes = state["shapes"]
        self._allocate()
        self._matrix[: len(self)] = state["_matrix"]


class TaskIndex:
    """The slots of each task; looked up again when rows have come in."""

    _known, _slots = -1, dict[int, np.ndarray]()

    def slots(self, ring: Ring) -> dict[int, np.ndarray]:
        """Return the filled slots of each task, both ascending."""
        if self._known != ring.num_added:
            tasks = ring.views["obs/task_id"][: len(ring)].flatten()  # a view reads far slower
            self._slots = {int(task): np.flatnonzero(tasks == task) for task in np.unique(tasks)}
            self._known = ring.num_added
        return self._slots

    def sample(
        self, ring: Ring, size: int, rng: np.random.Generator, weights: Mapping[int, float]
    ) -> np.ndarray:
        """Return (size,) slots, of each task in proportion to its weight (1 if it has none).

        Each task gets its share rounded up or down, at random so that it is right on average. With
        replacement inside a task; ``size`` must be positive and some slot filled.
        """
        slots = self.slots(ring)
        parts = np.cumsum([weights.get(task, 1.0) for task in slots])
        ends = np.floor(parts / parts[-1] * size + rng.random()).astype(np.int64)
        ends[-1] = size  # whatever rounding says
        shares = np.diff(ends, prepend=0).tolist()
        drawn = [
            mine[rng.integers(len(mine), size=share)]
            for mine, share in zip(slots.values(), shares, strict=True)
        ]
        return np.concatenate(drawn)
