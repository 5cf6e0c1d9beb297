"""What goes into and comes out of the shared table, as arrays of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from vla_gym.errors import InvalidActionError
from vla_gym.vector.env_table import EnvTable
from vla_gym.vector.shared_memory import INFO_BITS, INFO_TYPES, TEXT_INFO, read_value

Arrays = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class Batch:
    """Writes actions into a table and reads results off it."""

    def __init__(
        self,
        table: EnvTable,
        mode: AutoresetMode,
        observation_space: spaces.Space[Any],
        *,
        copy: bool,
    ) -> None:
        """Look at a table; ``copy``: whether observations of all are copies or views of it."""
        self._table, self._mode = table, mode
        self._space, self._copy = observation_space, copy
        self._everyone = np.arange(len(table.busy))

    def write_actions(self, actions: Any, ids: np.ndarray) -> None:
        """Check actions and put them into the table.

        Raises:
            InvalidActionError: Wrong shape, dtype or not finite.
            gymnasium.error.ResetNeeded: With DISABLED, where an episode is over.
        """
        ended = self._table.ended[ids]
        if self._mode == AutoresetMode.DISABLED and ended.any():
            raise gym.error.ResetNeeded(
                f"The episodes of environments {ids[ended].tolist()} are over: with autoreset "
                "DISABLED, reset them first: reset(options={'reset_mask': mask})."
            )
        column = self._table.columns["action"]
        try:
            array = np.asarray(actions)
        except (TypeError, ValueError, RuntimeError):  # as in vla_gym.actions
            array = np.empty(0, object)
        expected = (len(ids), *column.shape[1:])
        if array.shape != expected or not np.can_cast(array.dtype, column.dtype, "same_kind"):
            raise InvalidActionError(
                f"Expected actions of shape {expected} and dtype {column.dtype}, got shape "
                f"{array.shape} and dtype {array.dtype}."
            )
        with np.errstate(over="ignore"):  # what is too large becomes inf, which is refused
            array = array.astype(column.dtype, copy=False)
        if column.dtype.kind == "f" and not np.isfinite(array).all():
            finite = np.isfinite(array).reshape(len(ids), -1).all(1)
            if not (finite | ended).all():
                raise InvalidActionError(
                    f"The actions of environments {ids[~finite & ~ended].tolist()} are not finite. "
                    "Nothing was executed; check the policy for exploding weights."
                )
        column[ids] = array

    def align(self) -> None:
        """Bring all current observations into the same half of the double buffer."""
        table, half = self._table, self._table.half
        for i in np.flatnonzero(half != half[0]).tolist():
            for name in table.obs_columns:
                table.columns[name][half[0], i] = table.columns[name][half[i], i]
            half[i] = half[0]

    def observations(self, ids: np.ndarray | None) -> Any:
        """Return the current observations of some environments or (None) of all."""
        table, half, names = self._table.columns, self._table.half, self._table.obs_columns
        if ids is not None:
            arrays = {name: table[name][half[ids], ids] for name in names}
        elif (half == half[0]).all():
            arrays = {name: table[name][half[0]] for name in names}
            if self._copy:
                arrays = {name: array.copy() for name, array in arrays.items()}
        else:
            arrays = {name: table[name][half, self._everyone] for name in names}
        return read_value(self._space, arrays)

    def collect(self, ids: np.ndarray | None, acted: np.ndarray | None = None) -> Arrays:
        """Return what came of a command, for some environments or (None) for all.

        Args:
            ids: Rows of the result.
            acted: Which of all environments had a command; None for every one.
        """
        known, table = self._table, self._table.columns
        rows = self._everyone if ids is None else ids
        active = None if acted is None else np.isin(rows, acted)
        terminated, truncated = table["terminated"][rows], table["truncated"][rows]
        extras = {i: e.infos for i, e in known.extras.items() if e.infos}
        infos = batch_infos(table, "info", rows, active, known.texts, extras)
        ended = terminated | truncated
        restarted = known.restarted[rows]
        if active is not None:
            ended, restarted = ended & active, restarted & active
        if ended.any():
            if self._mode == AutoresetMode.SAME_STEP:
                self._add_final(infos, rows, ended)
            counted = ended & table["episode_ended"][rows]
            if counted.any():
                infos["episode_stats"] = episode_stats(table, rows, counted)
                infos["_episode_stats"] = counted
        if restarted.any():
            infos["worker_restarted"], infos["_worker_restarted"] = restarted, restarted.copy()
        return self.observations(ids), table["reward"][rows], terminated, truncated, infos

    def _add_final(self, infos: dict[str, Any], rows: np.ndarray, ended: np.ndarray) -> None:
        known, table = self._table, self._table.columns
        final_obs = np.full(len(rows), None, dtype=object)
        for row in np.flatnonzero(ended).tolist():
            arrays: dict[str, Any] = {
                name: table[f"final_{name}"][rows[row], ...].copy()[()]
                for name in known.obs_columns
            }
            final_obs[row] = read_value(self._space, arrays)
        extras = {i: e.final_infos for i, e in known.extras.items() if e.final_infos}
        final = batch_infos(table, "final_info", rows, ended, known.final_texts, extras)
        killed = ended & known.killed[rows]
        if killed.any():
            final["worker_restarted"], final["_worker_restarted"] = killed, killed.copy()
        infos |= {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": final,
            "_final_info": ended.copy(),
        }


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
        rows: VectorEnv[Any, Any, Any] = VectorEnv()  # knows Gymnasium's rules for infos
        rows.num_envs, rows.closed = len(ids), True
        for row, i in enumerate(ids.tolist()):
            if extras.get(i) and (active is None or active[row]):
                infos = rows._add_info(infos, extras[i], row)
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
