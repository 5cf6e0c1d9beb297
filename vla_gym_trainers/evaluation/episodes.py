"""Which episodes an evaluation consists of, and their rows in a result card."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vla_gym.envs.checks import parse_tasks
from vla_gym.errors import ConfigError
from vla_gym.rollout import Episode, Start
from vla_gym.suites import get_suite

_COLUMNS = ("success", "terminated", "truncated", "length", "achieved", "achieved_step")


def to_row(episode: Episode) -> dict[str, Any]:
    """Return an episode on an official state as plain JSON types."""
    row = asdict(episode)
    del row["start"], row["replays"]
    start = episode.start
    return {
        "suite": start.suite,
        "task_id": start.task_id,
        "init_state_id": start.init_state_id,
        **row,
    }


def from_row(row: Mapping[str, Any]) -> Episode:
    """Return the episode that :func:`to_row` described.

    Raises:
        ConfigError: If the row lacks something or holds a wrong type.
    """
    kinds = {"suite": str, "success": bool, "terminated": bool, "truncated": bool}
    values: dict[str, Any] = {}
    for name in ("suite", "task_id", "init_state_id", *_COLUMNS):
        value = row.get(name) if isinstance(row, Mapping) else None
        optional = name.startswith("achieved") and value is None
        if not optional and type(value) is not kinds.get(name, int):
            raise ConfigError(f"An episode's {name!r} cannot be {value!r} (row {row!r}).")
        values[name] = value
    start = Start(*(values.pop(name) for name in ("suite", "task_id", "init_state_id")))
    return Episode(start, **values)


def all_starts(
    suites: Sequence[str], task_ids: Sequence[int] | None, episodes: int
) -> tuple[Start, ...]:
    """Return every start of an evaluation: suites as given, then tasks, then states 0..n-1.

    Raises:
        UnknownTaskError: If a suite or task does not exist.
        ConfigError: If a suite or task is named twice, or there is none.
    """
    names = [get_suite(suite).name for suite in suites]
    for what, values in (("--suite", names), ("--task-ids", task_ids)):
        if values is not None and (not values or len(set(values)) != len(values)):
            raise ConfigError(f"{what} needs at least one value, each once; got {list(values)}.")
    parts = [get_suite(name) for name in names]
    tasks = [part.tasks[i] for part in parts for i in parse_tasks(part, task_ids)]
    if len(set(tasks)) != len(tasks):
        raise ConfigError(f"--suite names tasks twice: {list(suites)}.")
    return tuple(Start(t.suite, t.task_id, state) for t in tasks for state in range(episodes))


def parse_shard(text: str | None) -> tuple[int, int]:
    """Return part and number of parts of ``"i/n"``, (1, 1) for None.

    Raises:
        ConfigError: If it is not like ``2/4``.
    """
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ConfigError(f"--shards must be i/n with 1 <= i <= n, e.g. 2/4; got {text!r}.")
    return part, parts


def shard(starts: Sequence[Start], part: int, parts: int) -> tuple[Start, ...]:
    """Return part ``part`` (from 1) of ``parts``: every n-th start, so that all take as long."""
    return tuple(starts[part - 1 :: parts])
