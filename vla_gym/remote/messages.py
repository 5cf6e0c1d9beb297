"""What a part of a vector environment answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_gym.vector.env_row import Extras
from vla_gym.vector.shared_memory import INFO_BITS
from vla_gym.vector.worker import Event

#: What a part says to a command, see ``Part``.
Answer = list[Event]
_NONE = np.zeros(1, np.uint64)
# Infos that the receiver makes again from columns.
_MADE_AGAIN = ("final_obs", "final_info", "episode_stats", "worker_restarted")


@dataclass(frozen=True)
class Rows:
    """What n environments of a part have done.

    Attributes:
        columns: (n, ...) each: columns of the table, observations as ``obs/...``.
        final_ids: (m,) environments whose episode ended and that were reset in the same step.
        finals: (m, ...) each: their columns ``final_obs/...`` and ``final_info/...``.
        extras: Infos that have no column, by environment.
    """

    columns: dict[str, np.ndarray]
    final_ids: np.ndarray
    finals: dict[str, np.ndarray]
    extras: dict[int, Extras]

    @classmethod
    def of(
        cls,
        result: tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]],
        ids: np.ndarray,
        written: Mapping[str, np.ndarray],
        texts: Sequence[str | None],
    ) -> Rows:
        """Put together what a part's ``recv`` returned.

        Args:
            result: Of the outermost wrapper, whose rewards, flags and infos count; but for
                ``instruction`` and ``episode_stats``, which are the environments' own.
            ids: (n,) numbers of the same environments among those of all parts, ascending.
            written: See ``PartEnv.written``.
            texts: (n,) new instructions.
        """
        obs, rewards, terminated, truncated, infos = result
        unset = {
            f"{prefix}/{key}"
            for prefix in ("info", "final_info")
            for key, bit in INFO_BITS.items()
            if not (written.get(f"{prefix}_set", _NONE) & np.uint64(bit)).any()
        }
        written = {name: rows for name, rows in written.items() if name not in unset}
        for prefix, told in (("info", infos), ("final_info", infos.get("final_info", {}))):
            for key in INFO_BITS:
                if key in told and (name := f"{prefix}/{key}") in written:
                    mask = told[f"_{key}"]
                    written[name][mask] = told[key][mask]
        columns = {name: rows for name, rows in written.items() if not name.startswith("final_")}
        columns |= {"reward": rewards, "terminated": terminated, "truncated": truncated}
        columns |= flatten(obs)
        ended = np.flatnonzero(infos.get("_final_obs", np.zeros(0, bool)))
        finals = {}
        if len(ended):
            finals = {n: rows[ended] for n, rows in written.items() if n.startswith("final_")}
            last = [flatten(infos["final_obs"][row], "final_obs") for row in ended]
            finals |= {name: np.stack([one[name] for one in last]) for name in last[0]}
        return cls(columns, ids[ended], finals, _extras(ids, infos, written, texts))


def flatten(value: Any, name: str = "obs") -> dict[str, np.ndarray]:
    """Return the arrays of an observation by the names of the table's columns."""
    if isinstance(value, Mapping):
        found: dict[str, np.ndarray] = {}
        for key, inner in value.items():
            found |= flatten(inner, f"{name}/{key}")
        return found
    return {name: np.asarray(value)}


def _extras(
    ids: np.ndarray,
    infos: Mapping[str, Any],
    written: Mapping[str, np.ndarray],
    texts: Sequence[str | None],
) -> dict[int, Extras]:
    """Return what has no column, for the environments that have any of it."""
    other = _beside_columns(infos, written["info_set"])
    final: dict[str, Any] = {}
    if "final_info" in infos:
        final = _beside_columns(infos["final_info"], written["final_info_set"])
    if not (other or final or any(text is not None for text in texts)):
        return {}
    extras = {}
    for row, i in enumerate(ids.tolist()):
        found = Extras(info_row(other, row), info_row(final, row), texts[row])
        if found:
            extras[i] = found
    return extras


def _beside_columns(infos: Mapping[str, Any], present: np.ndarray) -> dict[str, Any]:
    """Return infos with masks of the rows in which no column has them; bits say which it has."""
    found: dict[str, Any] = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None or key in _MADE_AGAIN:
            continue
        if key in INFO_BITS:
            mask = mask & ((present & np.uint64(INFO_BITS[key])) == 0)
        if mask.any():
            found |= {key: values, f"_{key}": mask}
    return found


def info_row(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the infos that a row has, as the environment gave them."""
    found = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None or not mask[row]:
            continue
        value = info_row(values, row) if isinstance(values, Mapping) else values[row]
        # Gymnasium makes arrays of Python's bools, but not of NumPy's.
        is_bool = isinstance(value, np.bool_) and values.dtype == bool
        found[key] = bool(value) if is_bool else value
    return found
