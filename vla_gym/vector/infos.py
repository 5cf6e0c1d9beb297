"""Infos of a batch in Gymnasium's form, read off the shared table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from vla_gym.vector.rows import INFO_BITS, INFO_TYPES, TEXT_INFO


class _Rows(VectorEnv[Any, Any, Any]):
    """Gymnasium's rules for putting infos together, for any number of rows."""

    closed = True

    def __init__(self, num_rows: int) -> None:
        self.num_envs = num_rows

    def add(self, infos: dict[str, Any], info: dict[str, Any], row: int) -> dict[str, Any]:
        return self._add_info(infos, info, row)


def batch_infos(
    table: Mapping[str, np.ndarray],
    prefix: str,
    ids: np.ndarray,
    active: np.ndarray,
    texts: Sequence[str | None],
    extras: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    """Return the infos of some environments as ``SyncVectorEnv`` would.

    Args:
        table: The shared table.
        prefix: ``"info"`` or ``"final_info"``.
        ids: (n,) environments; row k of the result is environment ``ids[k]``.
        active: (n,) bool: which of them have infos; the others' masks are False.
        texts: Instruction by environment.
        extras: Infos that are not in the table, by environment.
    """
    infos: dict[str, Any] = {}
    present = np.where(active, table[f"{prefix}_set"][ids], 0)
    for key in INFO_TYPES:
        mask = (present & np.uint64(INFO_BITS[key])) != 0
        if mask.any():
            values = table[f"{prefix}/{key}"][ids]
            values[~mask] = 0
            infos[key], infos[f"_{key}"] = values, mask
    mask = (present & np.uint64(INFO_BITS[TEXT_INFO])) != 0
    if mask.any():
        values = np.full(len(ids), None, dtype=object)
        for row in np.flatnonzero(mask):
            values[row] = texts[ids[row]]
        infos[TEXT_INFO], infos[f"_{TEXT_INFO}"] = values, mask
    if extras:
        rows = _Rows(len(ids))
        for row, i in enumerate(ids.tolist()):
            if active[row] and extras.get(i):
                infos = rows.add(infos, extras[i], row)
    return infos


def episode_stats(
    table: Mapping[str, np.ndarray], ids: np.ndarray, ended: np.ndarray
) -> dict[str, Any]:
    """Return the statistics of the episodes that ended, with masks.

    Returns:
        ``return`` float64, ``length`` int64 in control steps, ``success`` bool.
    """
    stats: dict[str, Any] = {}
    for key in ("return", "length", "success"):
        values = table[f"episode_{key}"][ids]
        values[~ended] = 0
        stats[key], stats[f"_{key}"] = values, ended.copy()
    return stats
