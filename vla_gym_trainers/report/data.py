"""What a report is made of: run directories and result cards, read, checked and grouped by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym.outside import Object, parse_json, read_bytes, read_json, to_type
from vla_gym_trainers.evaluation.card_types import LogRow, RunConfig, TrainingCard
from vla_gym_trainers.evaluation.cards import EvalCard, read_card
from vla_gym_trainers.runs.settings import command_of

#: Trainers whose runs are shown.
TRAINERS = ("td3", "ppo", "grpo")
WANTED = "a run directory of vla-gym-train " + " | ".join(TRAINERS) + ", or a card of vla-gym eval"

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

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        path: Its directory, or the file of its card.
        name: What the page calls it.
        kind: Its trainer.
        config: All settings.
        rows: Logs, oldest first; empty without ``metrics.jsonl``.
        card: Its result card, None while there is none.
    """

    path: Path
    name: str
    kind: str
    config: dict[str, Any]
    rows: tuple[Row, ...]
    card: dict[str, Any] | None

    @property
    def results(self) -> dict[str, Any]:
        """Results of the card; empty without one."""
        return {} if self.card is None else self.card["results"]

    @property
    def unit(self) -> str:
        """What a step of its logs is."""
        return "chunks" if self.kind == "td3" else "control steps"

    @property
    def control_steps(self) -> float | None:
        """Control steps of one of its steps, of chunks their mean; None before any were logged."""
        if self.kind != "td3":
            return 1.0
        for row in reversed(self.rows):
            if row["step"] and "time/total_env_steps" in row:
                return float(row["time/total_env_steps"] / row["step"])
        training = self.results.get("training", {})
        known = training.get("chunks") and training.get("env_steps")
        return training["env_steps"] / training["chunks"] if known else None


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed; the place among the groups sets the colour."""

    index: int
    label: str
    runs: tuple[Run, ...]


def read_sources(paths: Sequence[Path]) -> tuple[list[Run], list[tuple[str, EvalCard]]]:
    """Read everything that a report names: run directories, result cards, directories with one.

    Returns:
        Runs, and evaluations with the name that the page gives them.

    Raises:
        ConfigError: If one is missing, damaged, or something else.
    """
    runs, cards = [], []
    for path, name in zip(paths, short_names(paths), strict=True):
        if not path.exists():
            raise ConfigError(f"{path} does not exist: expected {WANTED}.")
        if (path / "config.json").is_file():
            runs.append(_read_run(path, name))
            continue
        file = _card_file(path)
        card = read_json(file, Object, advice=f"Expected {WANTED}.")
        if card.get("kind") == "eval":
            cards.append((name, read_card(file)))
        else:
            runs.append(Run(file, name, _checked_kind(card, file), card["config"], (), card))
    return runs, cards


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return for each path the fewest last parts that tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    parts = [p[:-1] if p[-1] == "card.json" and len(p) > 1 else p for p in parts]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _card_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if (path / "card.json").is_file():
        return path / "card.json"
    if (path / "card.rows.jsonl").is_file():
        raise ConfigError(
            f"{path} holds an evaluation that has not ended: finish it with vla-gym eval --resume."
        )
    raise ConfigError(f"{path} holds no config.json and no card.json: expected {WANTED}.")


def _read_run(path: Path, name: str) -> Run:
    file, card_file, metrics = (path / n for n in ("config.json", "card.json", "metrics.jsonl"))
    config = read_json(file, Object, advice=f"Expected {WANTED}.")
    to_type(config, RunConfig, str(file))
    rows = read_rows(metrics) if metrics.is_file() else ()
    if card_file.is_file():
        card = read_json(card_file, Object, advice=f"Expected {WANTED}.")
        return Run(path, name, _checked_kind(card, card_file), config, rows, card)
    kind = command_of(config)
    if kind not in TRAINERS:
        raise ConfigError(f"{file} is of no trainer that the report knows: expected {WANTED}.")
    return Run(path, name, kind, config, rows, None)


def _checked_kind(card: Mapping[str, Any], file: Path) -> str:
    kind = str(card.get("kind"))
    if kind not in TRAINERS:
        raise ConfigError(f"{file} is a card of kind {kind!r:.80}: expected {WANTED}.")
    to_type(card, TrainingCard, f"{file} is damaged")
    return kind


def read_rows(file: Path) -> tuple[Row, ...]:
    """Return the rows of a ``metrics.jsonl``; a half-written last line is left out.

    Raises:
        ConfigError: If another line is damaged, or no log of a training.
    """
    lines = read_bytes(file).splitlines()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        origin = f"{file}, line {number}, is no log of a training"
        try:
            rows.append(parse_json(line, Row, origin))
            to_type(rows[-1], LogRow, origin)
        except ConfigError:
            if number == len(lines):
                return tuple(rows[: number - 1])  # of a process that is writing, or was killed
            raise
    return tuple(rows)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in nothing but the seed, in the order in which they were named."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    groups = [tuple(members) for members in found.values()]
    labels = [_label(members, [other[0] for other in groups]) for members in groups]
    return [
        Group(i, label if labels.count(label) == 1 else _names(members), members)
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
        chosen = {text_of(config[key]) for config in configs if key in config}
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
        return _names(members)
    return ", ".join([first.kind, *(f"{k}={text_of(first.config.get(k))}" for k in names)])


def _names(members: Sequence[Run]) -> str:
    return f"{members[0].kind}: {', '.join(run.name for run in members)}"


def text_of(value: Any) -> str:
    """Return a setting as text: "-" for none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def compact(value: float) -> str:
    """Return a number in few characters: 12,500 as ``12.5k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.3g}"
