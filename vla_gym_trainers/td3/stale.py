"""Stored observations that an older VLA has looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from vla_gym_trainers.td3.replay import ChunkReplayBuffer

Side = Literal["obs", "next"]


def renew(
    buffer: ChunkReplayBuffer,
    index: np.ndarray,
    sides: tuple[Side, ...],
    oldest: int,
    look: Callable[[np.ndarray, np.ndarray], Mapping[str, Any]],
    batch_size: int,
) -> int:
    """Show the VLA again what is stale in some slots, and write down what it makes of it.

    An observation is shown once, and written wherever it is stored: what ends a transition begins
    another, and with a stride it is in several.

    Args:
        buffer: Its rows change in place.
        index: (B,) slots.
        sides: Observations before the chunk, after it, or both.
        oldest: The oldest version that is not stale.
        look: Gives new values by key, (n, ...) or one number, for what the VLA saw, (n, L) uint8,
            and proprio (n, P).
        batch_size: The most that it is shown at once.

    Returns:
        How many stored observations were stale, of those in the slots.
    """
    stored = {"obs": buffer.observations, "next": buffer.next_observations}
    slots = np.unique(index)
    stale = [(stored[side], stored[side]["vla_version"][slots, 0] < oldest) for side in sides]
    count = sum(int(old.sum()) for _, old in stale)
    if not count:
        return 0
    distinct = np.unique(np.concatenate([_keys(rows, slots[old]) for rows, old in stale]), axis=0)
    places = {key.tobytes(): i for i, key in enumerate(distinct)}
    found = []
    for rows in stored.values():
        near = np.flatnonzero(np.isin(rows["vla_input"][: buffer.size()], distinct[:, 0]))
        at = np.array([places.get(key.tobytes(), -1) for key in _keys(rows, near)], np.int64)
        found.append((rows, near[at >= 0], at[at >= 0]))
    for first in range(0, len(distinct), batch_size):
        part = distinct[first : first + batch_size]
        made = look(buffer.inputs[part[:, 0].astype(np.int64)], part[:, 1:])
        for rows, near, at in found:
            mine = (first <= at) & (at < first + batch_size)
            for key, values in made.items():
                rows[key][near[mine]] = values[at[mine] - first] if np.ndim(values) else values
    return count


def _keys(rows: Mapping[str, np.ndarray], slots: np.ndarray) -> np.ndarray:
    """Return (n, 1 + P): all that tells the VLA one stored observation from another."""
    return np.column_stack([rows["vla_input"][slots], rows["proprio"][slots]])
