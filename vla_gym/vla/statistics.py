"""Statistics of the data that a policy was trained on, and normalising with them.

Checkpoints carry them as ``dataset_statistics.json`` or as ``norm_stats`` in config.json, both of
the form ``{key: {"action": {"q01": [...], "q99": [...], "mask": [...], ...}, "proprio": {...}}}``
with one key for each data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from msgspec import Meta, Struct

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla.files import read_json

#: How numbers are scaled, and the two statistics that it takes.
MODES = {"q99": ("q01", "q99"), "min_max": ("min", "max"), "mean_std": ("mean", "std")}


_Numbers = Annotated[list[float], Meta(max_length=10_000)] | None


class _Quantity(TypedDict, total=False):
    mean: _Numbers
    std: _Numbers
    min: _Numbers
    max: _Numbers
    q01: _Numbers
    q99: _Numbers
    mask: list[bool] | None
    norm_mode: str | None


class DataSet(TypedDict, total=False):
    """Statistics of a data set, by quantity; a mode says how they are meant."""

    action: _Quantity | None
    proprio: _Quantity | None


Statistics = dict[str, DataSet]


class _Config(Struct):
    norm_stats: Statistics | None = None


def read_statistics(folder: Path) -> Statistics:
    """Return the statistics of a checkpoint, by data set.

    They are in dataset_statistics.json, which comes first, or ``norm_stats`` in config.json.

    Raises:
        WeightsError: If there are none, or they are no JSON of that form.
    """
    file = folder / "dataset_statistics.json"
    if file.is_file():
        found = read_json(file, Statistics)
    else:
        found = read_json(folder / "config.json", _Config).norm_stats or {}
    if not found:
        raise WeightsError(
            f"Checkpoint {folder} has no statistics to normalise with: expected "
            "dataset_statistics.json, or norm_stats in config.json. Copy the file from where the "
            "checkpoint was published."
        )
    return found


def choose_statistics(statistics: Statistics, key: str | None, checkpoint: str | Path) -> DataSet:
    """Return the statistics of the data set that the policy shall act for.

    Args:
        statistics: By data set.
        key: Name of one, also without its ending ``_no_noops``; None if there is only one.
        checkpoint: Named in errors.

    Raises:
        ConfigError: If the key is unknown, or None and there are several.
    """
    if key is None and len(statistics) == 1:
        return next(iter(statistics.values()))
    for name in (key or "", f"{key}_no_noops"):
        if name in statistics:
            return statistics[name]
    problem = f"has no statistics {key!r}" if key else "has statistics of several data sets"
    raise ConfigError(
        f"Checkpoint {checkpoint} {problem}: choose with unnorm_key=... among "
        f"{', '.join(sorted(statistics))}."
    )


class Normalizer:
    """Scales numbers by the statistics of a data set, and back.

    With ``q99`` and ``min_max``, low..high becomes -1..1; with ``mean_std``, the mean becomes 0 and
    the standard deviation 1. Entries outside the mask are left as they are.

    Attributes:
        size: Number of entries.
    """

    def __init__(
        self,
        statistics: Mapping[str, Any],
        mode: str = "q99",
        *,
        epsilon: float = 0.0,
        clip: bool = False,
    ) -> None:
        """Take what is needed out of the statistics.

        Args:
            statistics: Of one quantity, e.g. ``statistics[key]["action"]``; ``"mask"`` says which
                entries are scaled, all without it.
            mode: One of :data:`MODES`.
            epsilon: Added to the range; with ``mean_std`` to the divisor alone, as is the custom.
            clip: Whether normalised numbers are clipped to [-1, 1].

        Raises:
            ConfigError: If the mode is unknown.
            WeightsError: If the statistics lack what the mode takes, or sizes differ.
        """
        if mode not in MODES:
            raise ConfigError(f"Expected a mode of {', '.join(MODES)}, got {mode!r:.80}.")
        missing = [name for name in MODES[mode] if statistics.get(name) is None]
        if missing:
            raise WeightsError(
                f"Normalising by {mode} takes {' and '.join(missing)}, the statistics have "
                f"{', '.join(sorted(statistics))}."
            )
        first, second = (
            torch.as_tensor(statistics[name], dtype=torch.float64).flatten() for name in MODES[mode]
        )
        mask = statistics.get("mask")
        if mask is None:
            mask = [True] * len(first)
        self.size = len(first)
        if not len(first) == len(second) == len(mask):
            raise WeightsError(
                f"Expected statistics of one size, got {' and '.join(MODES[mode])} of sizes "
                f"{len(first)} and {len(second)} and a mask of size {len(mask)}."
            )
        self._mask = torch.as_tensor(mask, dtype=torch.bool)
        self._clip = clip
        # x = normalised * multiplier + offset; normalised = (x - offset) / divisor
        if mode == "mean_std":
            self._offset, self._multiplier, self._divisor = first, second, second + epsilon
        else:
            half = (second - first + epsilon) / 2
            self._offset, self._multiplier, self._divisor = first + half, half, half

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        """Scale values (..., size) of a float dtype; the result has the same dtype and device."""
        mask, offset, divisor = self._constants(values, self._offset, self._divisor)
        result = torch.where(mask, (values - offset) / divisor, values)
        return result.clamp(-1.0, 1.0) if self._clip else result

    def unnormalize(self, values: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`normalize` on values (..., size), without clipping."""
        mask, offset, multiplier = self._constants(values, self._offset, self._multiplier)
        return torch.where(mask, values * multiplier + offset, values)

    def _constants(self, values: torch.Tensor, *constants: torch.Tensor) -> Iterable[torch.Tensor]:
        if values.shape[-1:] != (self.size,) or not values.is_floating_point():
            raise ConfigError(
                f"Expected float values of shape (..., {self.size}), got {values.dtype} of shape "
                f"{tuple(values.shape)}."
            )
        return (
            self._mask.to(values.device),
            *(x.to(values.device, values.dtype) for x in constants),
        )
