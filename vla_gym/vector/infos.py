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
    active: np.ndarray | None,
    texts: Sequence[str | None],
    extras: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    """Return the infos of some environments as ``SyncVectorEnv`` would.

    Args:
        table: The shared table.
        prefix: ``"info"`` or ``"final_info"``.
        ids: (n,) environments; row k of the result is environment ``ids[k]``.
        active: (n,) bool: which of them have infos, the others' masks are False; None for all.
        texts: Instruction by environment.
        extras: Infos that are not in the table, by environment.
    """
    present = table[f"{prefix}_set"][ids]
    if active is not None:
        present[~active] = 0
    # Nearly always all environments have the same infos: then no mask needs to be computed.
    first = int(present[0])
    same = bool((present == first).all())
    infos: dict[str, Any] = {}
    for key in INFO_TYPES:
        mask = _mask(present, first, same, INFO_BITS[key])
        if mask is not None:
            values = table[f"{prefix}/{key}"][ids]
            if not same:
                values[~mask] = 0
            infos[key], infos[f"_{key}"] = values, mask
    mask = _mask(present, first, same, INFO_BITS[TEXT_INFO])
    if mask is not None:
        values = np.full(len(ids), None, dtype=object)
        values[mask] = [texts[i] for i in ids[mask].tolist()]
        infos[TEXT_INFO], infos[f"_{TEXT_INFO}"] = values, mask
    if extras:
        rows = _Rows(len(ids))
        for row, i in enumerate(ids.tolist()):
            if extras.get(i) and (active is None or active[row]):
                infos = rows.add(infos, extras[i], row)
    return infos


def _mask(present: np.ndarray, first: int, same: bool, bit: int) -> np.ndarray | None:
    """Return which rows have an info, or None if no row has it."""
    if same:
        return np.ones(len(present), bool) if first & bit else None
    mask = (present & np.uint64(bit)) != 0
    return mask if mask.any() else None


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
