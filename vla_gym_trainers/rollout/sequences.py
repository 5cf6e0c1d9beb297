"""Contiguous windows of rollouts [rows, chunks, ...], none across an episode's end.

Rows of several episodes (``|``: an end, ``x``: not valid) and their windows of at most 3 chunks::

    row 0:  a b c d | e f            a b c   d - -   e f -
    row 1:  g | h x i j | k          g - -   h - -   i j -   k - -

What is read off a window, e.g. by a recurrent network, sees one episode from one of its chunks on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """W windows of at most L chunks; see the module.

    Attributes:
        rows: (W,) int64, the row of each.
        first: (W,) int64, the slot of its first chunk.
        lengths: (W,) int64, its number of chunks, from 1 to L.
    """

    rows: Tensor
    first: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: Tensor) -> Windows:
        """Return some of the windows, by indices or a mask (W,)."""
        return Windows(self.rows[which], self.first[which], self.lengths[which])

    @property
    def mask(self) -> Tensor:
        """(W, L) bool: False behind the end of a window; L is the longest one's length."""
        longest = int(self.lengths.max()) if len(self) else 1
        return torch.arange(longest) < self.lengths[:, None]

    def chunks(self) -> tuple[Tensor, Tensor]:
        """Return row and slot (n,) of all chunks, window after window."""
        return self.rows.repeat_interleave(self.lengths), ranges(self.first, self.lengths)

    def take(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what arrays [rows, chunks, ...] hold in the windows, (W, L, ...); 0 behind them.

        ``take(arrays)[name][mask]`` has the chunks (n, ...) in the order of :meth:`chunks`.
        """
        mask = self.mask
        where = self.chunks()
        taken = {}
        for name, array in arrays.items():
            taken[name] = array.new_zeros((*mask.shape, *array.shape[2:]))
            taken[name][mask] = array[where]
        return taken


def windows_of(valid: Tensor, terminated: Tensor, truncated: Tensor, length: int) -> Windows:
    """Cut the episodes of rows into windows of so many chunks, the last one of each into the rest.

    A window begins where an episode does, where a row does, behind a chunk that is not valid, and
    where the one before is full. So each chunk that is valid lies in exactly one window.

    Args:
        valid: [rows, chunks] bool: whether there is a chunk to learn from.
        terminated: [rows, chunks] bool: the episode ended with this chunk by success.
        truncated: [rows, chunks] bool: it ended with this chunk by its time limit.
        length: L, at least 1.

    Returns:
        The windows, row by row.
    """
    goes_on = torch.zeros_like(valid)
    goes_on[:, 1:] = valid[:, :-1] & ~(terminated | truncated)[:, :-1]
    slots = torch.arange(valid.shape[1]).expand_as(valid)
    begun = torch.where(goes_on, 0, slots).cummax(dim=1).values
    opens = valid & ((slots - begun) % length == 0)
    rows, first = opens.nonzero(as_tuple=True)
    window = opens.flatten().cumsum(0) - 1  # the newest one that has been opened
    return Windows(rows, first, window[valid.flatten()].bincount(minlength=len(rows)))


def ranges(first: Tensor, lengths: Tensor) -> Tensor:
    """Return ``first[i], first[i] + 1, ...``, ``lengths[i]`` numbers of each i, (n,) int64."""
    before = lengths.cumsum(0) - lengths
    return (first - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def runs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return where runs of equal numbers (n,) begin, and how long they are, int64 each."""
    lengths = numbers.unique_consecutive(return_counts=True)[1]
    return lengths.cumsum(0) - lengths, lengths


def unroll(
    step: Callable[[dict[str, Tensor], Tensor], Tensor],
    inputs: Mapping[str, Tensor],
    start: Tensor,
) -> Tensor:
    """Return the memory before each chunk of windows, by truncated back-propagation through time.

    Gradients flow from a chunk to all chunks before it in the same window. The start is detached,
    so to what was before the window they are exactly zero. Behind the end of a window there is
    something that depends on the padding: mask it.

    Args:
        step: From what a chunk shows, (W, ...) by name, and the memory (W, S) before it to the
            memory after it.
        inputs: (W, L, ...) by name, see :meth:`Windows.take`.
        start: (W, S), before the first chunks.

    Returns:
        (W, L, S).
    """
    memory = start.detach()
    before = [memory]
    for t in range(next(iter(inputs.values())).shape[1] - 1):
        memory = step({name: value[:, t] for name, value in inputs.items()}, memory)
        before.append(memory)
    return torch.stack(before, dim=1)
