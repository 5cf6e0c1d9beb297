"""Sets of rows, episode after episode, that are joined to one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from vla_gym.errors import ConfigError

T = TypeVar("T")


def join_episodes(parts: Sequence[T], nothing: str) -> T:
    """Join sets; tasks of the same name become one, episodes get new numbers.

    Args:
        parts: Dataclasses of arrays or tensors (N, ...), among them ``task`` (N,), an index into
            the list ``tasks`` of names, and ``episode`` (N,), a number each.
        nothing: What to say where there is none.

    Raises:
        ConfigError: If there is none.
    """
    if not parts:
        raise ConfigError(nothing)
    sets: list[dict[str, Any]] = [dict(vars(part)) for part in parts]
    tasks = list(dict.fromkeys(name for columns in sets for name in columns["tasks"]))
    first = 0
    for columns in sets:
        numbers = np.array([tasks.index(name) for name in columns.pop("tasks")], np.int64)
        columns["task"] = numbers[columns["task"]]
        columns["episode"] = first + np.unique(columns["episode"], return_inverse=True)[1]
        first = int(columns["episode"].max(initial=first - 1)) + 1
    joined = {name: [columns[name] for columns in sets] for name in sets[0]}
    merged = {
        name: torch.cat(column) if isinstance(column[0], torch.Tensor) else np.concatenate(column)
        for name, column in joined.items()
    }
    return dataclasses.replace(parts[0], **merged, tasks=tasks)  # type: ignore[type-var]
