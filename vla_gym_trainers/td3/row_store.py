"""Rows of bytes that many may refer to; each is kept once."""

from __future__ import annotations

import hashlib

import numpy as np


class RowStore:
    """Rows found by their content, counted by their references.

    What a chunk leads to is what the next one begins with, and with a stride the same frame is in
    several transitions: it takes memory once. Pickling keeps everything.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray | None] = []
        self._digests: list[bytes] = []
        self._counts: list[int] = []
        self._free: list[int] = []
        self._ids: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, rows: np.ndarray) -> np.ndarray:
        """Refer to each of some rows (n, L) once more; return their ids (n,) int64.

        Ids of rows that were let go are used again: they stay below twice as many as there are
        transitions.
        """
        return np.array([self._add(row) for row in rows], np.int64)

    def _add(self, row: np.ndarray) -> int:
        digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        i = self._ids.get(digest)
        if i is None:
            if not self._free:
                self._free.append(len(self._rows))
                self._rows.append(None)
                self._digests.append(b"")
                self._counts.append(0)
            i = self._free.pop()
            self._rows[i], self._digests[i] = row.copy(), digest
            self._ids[digest] = i
        self._counts[i] += 1
        return i

    def release(self, ids: np.ndarray) -> None:
        """Take one reference to each of some rows back; a row without any is let go."""
        for i in ids.tolist():
            self._counts[i] -= 1
            if not self._counts[i]:
                del self._ids[self._digests[i]]
                self._rows[i] = None
                self._free.append(i)

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows (n, L) of ids (n,)."""
        return np.stack([row for i in ids.tolist() if (row := self._rows[i]) is not None])
