"""What a report is made of: run directories and result cards, read, checked and grouped by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.cards import EvalCard, read_card

#: Trainers whose runs are shown -> a setting that only they have.
TRAINERS = {
    "td3": "critic_warmup_steps",
    "ppo": "gae_lambda",
    "grpo": "baseline",
}
#: These count chunks, the others control steps.
CHUNK_TRAINERS = ("td3",)
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
    def counts_chunks(self) -> bool:
        """Whether a step of its logs is a chunk, not a control step."""
        return self.kind in CHUNK_TRAINERS

    @property
    def chunk_len(self) -> int | None:
        """Control steps of a chunk; None if neither settings nor card say it."""
        found = self.config.get("chunk_len")
        if found is None and self.card is not None:
            found = self.card["environment"].get("chunk_len")
        return found

    @property
    def results(self) -> dict[str, Any]:
        """Results of the card; empty without one."""
        return {} if self.card is None else self.card["results"]

    @property
    def unit(self) -> str:
        """What a step of its logs is."""
        return "chunks" if self.counts_chunks else "control steps"


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


def read_sources(paths: Sequence[Path]) -> tuple[list[Run], list[tuple[str, EvalCard]]]:
    """Read everything that a report names.

    Args:
        paths: Run directories, result cards, directories with one.

    Returns:
        Runs, and evaluations with the name that the page gives them.

    Raises:
        ConfigError: If one is missing, damaged, or something else.
    """
    runs, cards = [], []
    for path, name in zip(paths, short_names(paths), strict=True):
        if not path.exists():
            raise ConfigError(f"{path} does not exist: expected {WANTED}.")
        if path.is_dir() and _is_run(path):
            runs.append(_read_run(path, name))
            continue
        file = _card_file(path)
        card = _read_json(file)
        if card.get("kind") == "eval":
            cards.append((name, read_card(file)))
        else:
            runs.append(_run_of_card(file, name, card))
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


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / "metrics.jsonl").is_file()


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
    config_file, card_file = path / "config.json", path / "card.json"
    if not config_file.is_file():
        raise ConfigError(f"{path} holds no config.json: expected {WANTED}.")
    config = _read_json(config_file)
    card = _read_json(card_file) if card_file.is_file() else None
    kind = _kind_of(config, config_file) if card is None else _checked_kind(card, card_file)
    metrics = path / "metrics.jsonl"
    rows = read_rows(metrics) if metrics.is_file() else ()
    return Run(path, name, kind, config, rows, card)


def _run_of_card(file: Path, name: str, card: dict[str, Any]) -> Run:
    kind = _checked_kind(card, file)
    return Run(file, name, kind, dict(card["config"]), (), card)


def _kind_of(config: Mapping[str, Any], file: Path) -> str:
    for kind, setting in TRAINERS.items():
        if setting in config:
            return kind
    raise ConfigError(f"{file} is of no trainer that the report knows: expected {WANTED}.")


def _checked_kind(card: Mapping[str, Any], file: Path) -> str:
    kind = card.get("kind")
    if kind not in TRAINERS:
        raise ConfigError(f"{file} is a card of kind {kind!r}: expected {WANTED}.")
    for key in ("config", "environment", "versions", "results", "seeds"):
        if not isinstance(card.get(key), dict):
            raise ConfigError(f"{file} is damaged: it has no {key!r}.")
    return str(kind)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object: expected {WANTED}.")
    return content


def read_rows(file: Path) -> tuple[Row, ...]:
    """Return the rows of a ``metrics.jsonl``; a half-written last line is left out.

    Raises:
        ConfigError: If another line is damaged, or no log of a training.
    """
    lines = file.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("it is no object")
            for key in ("step", "wall_s"):
                if not isinstance(row.get(key), int | float):
                    raise ValueError(f"it has no {key!r}")
        except ValueError as error:
            if number == len(lines):
                break  # of a process that is writing, or was killed while it wrote
            raise ConfigError(f"{file}, line {number}, is no log of a training: {error}") from error
        rows.append(row)
    return tuple(rows)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in nothing but the seed, in the order in which they were named."""
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
        return f"{first.kind}: {', '.join(run.name for run in members)}"
    return ", ".join([first.kind, *(f"{k}={text_of(first.config.get(k))}" for k in names)])


def text_of(value: Any) -> str:
    """Return a setting as text: "-" for none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
