"""A preallocated ring of rows with named columns, and where each group's rows are in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Column name -> shape and dtype of one row.
Columns = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class ReplayRing:
    """The newest ``capacity`` rows; columns of one dtype lie side by side in one matrix.

    So a batch is one gather a dtype, whatever the number of columns, a push one copy::

        float32 matrix (capacity, W):  | rl_token | vla_action | ... | rewards | discounts |
        int64 matrix (capacity, 1):    | task_id |

    Row number r (counted from the first push) is in slot ``r % capacity``.

    Attributes:
        views: Column name -> (capacity, *shape) view of its matrix.
        stage: Column name -> (max_push, *shape) view of the rows that the next push takes.
        num_added: Rows pushed in all.
    """

    def __init__(self, capacity: int, columns: Columns, max_push: int) -> None:
        """Allocate everything.

        Args:
            capacity: Slots.
            columns: Shape and dtype of each column.
            max_push: Largest number of rows of one push, at most ``capacity``.
        """
        self.capacity, self.num_added = capacity, 0
        self.columns = dict(columns)
        self._places: dict[str, tuple[str, int, int]] = {}
        widths: dict[str, int] = {}
        for name, (shape, dtype) in self.columns.items():
            kind, size = np.dtype(dtype).str, int(np.prod(shape, dtype=np.int64))
            start = widths.get(kind, 0)
            self._places[name] = (kind, start, start + size)
            widths[kind] = start + size
        self._matrices = {k: np.zeros((capacity, w), np.dtype(k)) for k, w in widths.items()}
        self._staged = {k: np.zeros((max_push, w), np.dtype(k)) for k, w in widths.items()}
        self.views = {name: self._view(self._matrices, name) for name in self.columns}
        self.stage = {name: self._view(self._staged, name) for name in self.columns}

    def _view(self, matrices: dict[str, np.ndarray], name: str) -> np.ndarray:
        kind, start, end = self._places[name]
        part = matrices[kind][:, start:end]
        return part.reshape(len(part), *self.columns[name][0])  # splits an axis: always a view

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def staged_finite(self, count: int) -> np.ndarray:
        """Return (count,) bool: which staged rows hold finite numbers only."""
        finite = np.ones(count, bool)
        for matrix in self._staged.values():
            if matrix.dtype.kind == "f":
                finite &= np.isfinite(matrix[:count]).all(axis=1)
        return finite

    def push(self, rows: np.ndarray) -> np.ndarray:
        """Copy staged rows into the ring, over the oldest ones if it is full.

        Args:
            rows: (n,) ascending indices into ``stage``.

        Returns:
            (n,) slots.
        """
        count = len(rows)
        start = self.num_added % self.capacity
        first = min(count, self.capacity - start)
        for kind, matrix in self._matrices.items():
            staged = self._staged[kind]
            block = staged if count == len(staged) else staged[rows]
            matrix[start : start + first] = block[:first]
            if first < count:
                matrix[: count - first] = block[first:]
        slots = (np.arange(self.num_added, self.num_added + count)) % self.capacity
        self.num_added += count
        return slots

    def gather(self, slots: np.ndarray, device: torch.device) -> dict[str, Tensor]:
        """Return the rows in (B,) slots as tensors by column, (B, *shape): one copy a dtype.

        A column of single numbers gives (B, 1).
        """
        # Torch's gather: NumPy's maps fresh memory for each large result, which costs more than
        # the copy itself.
        index = torch.from_numpy(slots)
        matrices = {
            kind: torch.from_numpy(matrix).index_select(0, index).to(device)
            for kind, matrix in self._matrices.items()
        }
        batch = {}
        for name, (kind, start, end) in self._places.items():
            part = matrices[kind][:, start:end]
            shape = self.columns[name][0]
            batch[name] = part.unflatten(1, shape) if len(shape) > 1 else part
        return batch

    def state(self) -> dict[str, Any]:
        """Return the rows that are filled, without a copy, and the count of all."""
        filled = {kind: matrix[: len(self)] for kind, matrix in self._matrices.items()}
        return {"matrices": filled, "num_added": self.num_added}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` of a ring with the same columns and capacity returned."""
        self.num_added = int(state["num_added"])
        for kind, rows in state["matrices"].items():
            self._matrices[kind][: len(rows)] = rows


class GroupIndex:
    """The slots of each group (task) of a ring, so that a draw from one group is O(1).

    A slot enters its group's list at the end and leaves it by taking the last one into its place:
    pushing and overwriting are O(1), and memory is one number a slot, lists growing by doubling.
    """

    def __init__(self, capacity: int) -> None:
        """Begin with all slots empty."""
        self._group = np.full(capacity, -1, np.int64)
        self._place = np.zeros(capacity, np.int64)
        self._lists: dict[int, np.ndarray] = {}
        self._counts: dict[int, int] = {}

    @property
    def counts(self) -> dict[int, int]:
        """Rows by group, ascending by group; groups without any are left out."""
        return {group: n for group, n in sorted(self._counts.items()) if n}

    def put(self, slot: int, group: int) -> None:
        """Note that a slot now holds a row of ``group``, whatever it held."""
        old = int(self._group[slot])
        if old == group:
            return
        if old >= 0:
            self._counts[old] -= 1
            members, hole = self._lists[old], self._place[slot]
            last = members[self._counts[old]]
            members[hole], self._place[last] = last, hole
        count = self._counts.get(group, 0)
        members = self._lists.setdefault(group, np.zeros(64, np.int64))
        if count == len(members):
            members = self._lists[group] = np.concatenate([members, np.zeros_like(members)])
        members[count] = slot
        self._group[slot], self._place[slot] = group, count
        self._counts[group] = count + 1

    def sample(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return (size,) slots, as many of each group (the remainder to groups drawn at random).

        With replacement inside a group; ``size`` must be positive and some slot filled.
        """
        groups = list(self.counts)
        shares = np.full(len(groups), size // len(groups))
        shares[rng.permutation(len(groups))[: size % len(groups)]] += 1
        drawn = [
            self._lists[group][rng.integers(self._counts[group], size=share)]
            for group, share in zip(groups, shares.tolist(), strict=True)
        ]
        return np.concatenate(drawn)

    def state(self) -> dict[int, np.ndarray]:
        """Return the lists (their order decides what a draw returns)."""
        return {g: self._lists[g][:n] for g, n in self._counts.items()}

    def restore(self, state: Mapping[int, np.ndarray]) -> None:
        """Take over what :meth:`state` of an index of the same capacity returned."""
        self.__init__(len(self._group))  # type: ignore[misc]
        for group, members in state.items():
            self._lists[group] = np.resize(members, max(64, len(members)))
            self._counts[group] = len(members)
            self._group[members], self._place[members] = group, np.arange(len(members))
