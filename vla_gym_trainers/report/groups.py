"""Which runs are seeds of one configuration, and in what configurations differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vla_gym_trainers.report.sources import Run

#: Settings that do not make another configuration: the seed, and what results do not depend on.
IGNORED = (
    "seed",
    "run_dir",
    "progress",
    "workers",
    "checkpoint_every",
    "keep_checkpoints",
    "videos",
)
# Settings in a group's label; with more of them the runs' names say it better.
_MOST_IN_LABEL = 2


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed.

    Attributes:
        index: Place among the groups, which sets the colour.
        label: What legends call it.
        runs: At least one.
    """

    index: int
    label: str
    runs: tuple[Run, ...]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Return the groups in the order in which their first runs were named."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    groups = [tuple(members) for members in found.values()]
    labels = [_label(members, [other[0] for other in groups]) for members in groups]
    return [
        Group(i, label, members)
        for i, (label, members) in enumerate(zip(labels, groups, strict=True))
    ]


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, with the value of each run (None: it has none).

    That one trainer has a setting and another one has not is no difference: no choice was made.
    """
    configs = [run.config for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in IGNORED[1:])
    found = {}
    for key in keys:
        chosen = {_text(config[key]) for config in configs if key in config}
        if len(chosen) > 1:
            found[key] = [config.get(key) for config in configs]
    return found


def _key(run: Run) -> str:
    config = {key: value for key, value in run.config.items() if key not in IGNORED}
    return json.dumps([run.kind, config], sort_keys=True)


def _label(members: Sequence[Run], firsts: Sequence[Run]) -> str:
    """Return the trainer and the one or two settings that matter, or else the names of the runs."""
    first = members[0]
    peers = [run for run in firsts if run.kind == first.kind]
    tasks = first.config.get("task_ids")
    text = f"{first.kind} {first.config.get('suite', '')}".strip()
    if len(peers) == 1:
        if tasks is not None and len(tasks) == 1:
            text += f" {tasks[0]}"
        return text
    names = [key for key in differences(peers) if key not in IGNORED]
    if len(names) > _MOST_IN_LABEL:
        return f"{first.kind}: {', '.join(run.name for run in members)}"
    return ", ".join([first.kind, *(f"{k}={_text(first.config.get(k))}" for k in names)])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
