"""Which episodes an evaluation consists of, and what became of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from vla_gym.envs.checks import parse_tasks
from vla_gym.errors import ConfigError
from vla_gym.suites import get_suite


class Start(NamedTuple):
    """Where an episode begins; sorts into the order in which episodes are listed.

    Attributes:
        suite: Suite name.
        task_id: Task in the suite.
        init_state_id: Official state, 0..49.
    """

    suite: str
    task_id: int
    init_state_id: int

    def __str__(self) -> str:
        """Return what messages call it."""
        return f"{self.suite} {self.task_id} state {self.init_state_id}"


@dataclass(frozen=True)
class Episode:
    """One episode that was played to its end.

    Attributes:
        suite, task_id, init_state_id: Where it began.
        success: The goal was reached.
        terminated: It ended because of that.
        truncated: It ended at the step limit.
        length: Control steps executed.
        achieved: With ``--confusion``: the task whose goal was the first to become true, of all
            tasks of the suite that share the scene; None: no goal did. Goals that held when the
            episode began do not count.
        achieved_step: Control step at which it did.
    """

    suite: str
    task_id: int
    init_state_id: int
    success: bool
    terminated: bool
    truncated: bool
    length: int
    achieved: int | None = None
    achieved_step: int | None = None

    @property
    def start(self) -> Start:
        """Where it began."""
        return Start(self.suite, self.task_id, self.init_state_id)

    def row(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Episode:
        """Return the episode that :meth:`row` described.

        Raises:
            ConfigError: If the row lacks something or holds a wrong type.
        """
        kinds = {"suite": str, "success": bool, "terminated": bool, "truncated": bool}
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(cls)):
            value = row.get(name) if isinstance(row, Mapping) else None
            optional = name.startswith("achieved") and value is None
            if not optional and type(value) is not kinds.get(name, int):
                raise ConfigError(f"An episode's {name!r} cannot be {value!r} (row {row!r}).")
            values[name] = value
        return cls(**values)


def all_starts(
    suites: Sequence[str], task_ids: Sequence[int] | None, episodes: int
) -> tuple[Start, ...]:
    """Return every start of an evaluation: suites as given, then tasks, then states 0..n-1.

    Raises:
        UnknownTaskError: If a suite or task does not exist.
        ConfigError: If a suite or task is named twice, or there is none.
    """
    names = [suite.removeprefix("libero_") for suite in suites]
    for what, values in (("--suite", names), ("--task-ids", task_ids)):
        if values is not None and (not values or len(set(values)) != len(values)):
            raise ConfigError(f"{what} needs at least one value, each once; got {list(values)}.")
    parts = [get_suite(name) for name in names]
    tasks = [part.tasks[i] for part in parts for i in parse_tasks(part, task_ids)]
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
