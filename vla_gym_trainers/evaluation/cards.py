"""Result cards of evaluations: where they lie, read, gone on with, put together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vla_gym.errors import ConfigError
from vla_gym.files import only_process, replacing
from vla_gym.outside import Object, parse_json, read_bytes, read_json, to_type
from vla_gym.rollout import Episode, Start
from vla_gym_trainers.evaluation.card_types import EpisodeRow, EvalCardContent, EvalLine
from vla_gym_trainers.evaluation.summary import to_row

KIND, SCHEMA = "eval", 2
CARD_FILE, ROWS_SUFFIX = "card.json", ".rows.jsonl"
#: Episodes of an evaluation; all of LIBERO's tasks have 6,500 official states.
MAX_EPISODES = 200_000


@dataclass(frozen=True)
class EvalCard:
    """A card that was read from a file: all of its content, and its episodes."""

    path: Path
    content: dict[str, Any]
    episodes: tuple[Episode, ...]

    @property
    def protocol(self) -> dict[str, Any]:
        """What was played, by whom, how: all that the results depend on, but for versions."""
        return self.content["protocol"]


def card_path(out: Path) -> Path:
    """Return the file of the card: ``out`` itself if it ends in .json, else ``out/card.json``."""
    return out if out.suffix == ".json" else out / CARD_FILE


def films_folder(out: Path) -> Path:
    """Return the folder of the films."""
    file = card_path(out)
    return file.with_name("films") if file.name == CARD_FILE else file.with_suffix(".films")


@contextmanager
def check_out(out: Path, *, resume: bool) -> Iterator[None]:
    """Check that a card can be written, and keep other processes from it.

    What an earlier run left there is welcome to ``resume`` only.

    Raises:
        ConfigError: If it cannot, another process is about to, or an earlier run's would be
            overwritten.
    """
    file = card_path(out)
    busy = f"Another process is writing {file}: wait for it, or choose another --out."
    with ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            trial = file.parent / f".{file.name}.trial"
            trial.touch()
            trial.unlink()
            stack.enter_context(only_process(file.parent / f".{file.name}.lock", busy))
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written ({error}).") from error
        left = [path for path in (file, RowsFile(file, {}).path) if path.exists()]
        if left and not resume:
            raise ConfigError(
                f"{left[0]} is there already: add --resume to go on with that run, or choose "
                "another --out."
            )
        yield


def read_card(path: Path) -> EvalCard:
    """Read a card from its file, or from the directory that holds ``card.json``.

    Raises:
        ConfigError: If there is none, or it is not one of ``vla-gym eval``.
    """
    file = path / CARD_FILE if path.is_dir() else path
    content = read_json(file, Object, advice="Expected a result card of vla-gym eval.")
    kind, schema = content.get("kind"), content.get("schema")
    if (kind, schema) != (KIND, SCHEMA):
        raise ConfigError(
            f"{file} is no result card of vla-gym eval: expected kind {KIND!r} and schema "
            f"{SCHEMA}, got {kind!r:.80} and {schema!r:.80}."
        )
    card = to_type(content, EvalCardContent, f"{file} is damaged", advice="Evaluate again.")
    return EvalCard(file, content, tuple(map(from_row, card.results.episodes)))


def from_row(row: EpisodeRow) -> Episode:
    """Return the episode that :func:`~.summary.to_row` described."""
    values = msgspec.structs.asdict(row)
    start = Start(*(values.pop(name) for name in ("suite", "task_id", "init_state_id", "seed")))
    return Episode(start, **values)


def starts_of(protocol: Mapping[str, Any]) -> tuple[Start, ...]:
    """Return every start that a protocol asks for, in the order of its card.

    Raises:
        ConfigError: If they are too many to be of an evaluation.
    """
    count = protocol["episodes"] * sum(map(len, protocol["tasks"].values()))
    if count > MAX_EPISODES:
        raise ConfigError(
            f"The protocol asks for {count} episodes ({protocol['episodes']} states a task): "
            f"expected at most {MAX_EPISODES}."
        )
    return tuple(
        Start.number(
            k, suite, task_id, protocol.get("scene_reset_interval"), protocol.get("first_seed")
        )
        for suite, task_ids in protocol["tasks"].items()
        for task_id in task_ids
        for k in range(protocol["episodes"])
    )


def check_comparable(protocol: Mapping[str, Any], other: EvalCard) -> None:
    """Check that another card was made in the same world.

    Raises:
        ConfigError: If protocol, assets, physics or looks differ.
    """
    world = ("assets", "physics", "variation", "scene_reset_interval", "observation_timing")
    for key in ("name", *world):
        if other.protocol.get(key) != protocol.get(key):
            raise ConfigError(
                f"--paired needs the same world and protocol; {key} is {protocol.get(key)} here, "
                f"{other.protocol.get(key)} in {other.path}."
            )


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> str | None:
    """Return the first thing in which two nested dicts differ, as words; None if they agree."""
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        a, b = mine.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            if found := difference(a, b, f"{prefix}{key}."):
                return found
        elif a != b:
            return f"{prefix}{key}: {a!r} and {b!r}"
    return None


def check_same(
    mine: Mapping[str, Any], found: Mapping[str, Any], path: Path, keys: Sequence[str]
) -> None:
    """Check that a file is of the same evaluation.

    Raises:
        ConfigError: If it is not, with the first thing in which they differ.
    """
    what = difference({k: mine.get(k) for k in keys}, {k: found.get(k) for k in keys})
    if what:
        raise ConfigError(
            f"{path} is of another evaluation; they differ in {what}. Shards and runs that go on "
            "need the same options and versions; or choose another --out."
        )


def merge(cards: Sequence[EvalCard], *, partial: bool) -> tuple[Episode, ...]:
    """Return the episodes of one or more cards that are parts of one evaluation.

    Raises:
        ConfigError: If they do not fit together, an episode is there twice, or, unless ``partial``,
            one is missing.
    """
    source: dict[Start, Path] = {}
    wanted = starts_of(cards[0].protocol)
    known = set(wanted)
    for card in cards:
        check_same(cards[0].content, card.content, card.path, ("protocol", "versions"))
        for episode in card.episodes:
            start = episode.start
            if start not in known:
                raise ConfigError(f"{card.path} holds {start}, which its protocol does not have.")
            if start in source:
                raise ConfigError(f"{start} is in {source[start]} and again in {card.path}.")
            source[start] = card.path
    missing = [start for start in wanted if start not in source]
    if missing and not partial:
        raise ConfigError(
            f"{len(missing)} of {len(wanted)} episodes are missing ({missing[0]}, ...): name the "
            "cards of all shards, or accept it with --partial."
        )
    return tuple(episode for card in cards for episode in card.episodes)


class RowsFile:
    """Episodes on disk while an evaluation runs: one JSON line each, after one that says what runs.

    It lies beside the card, and goes when the card is written.
    """

    def __init__(self, card: Path, header: Mapping[str, Any]) -> None:
        """Name the file beside a card's; only a run with the same header may go on."""
        self.path = card.with_name(card.name.removesuffix(".json") + ROWS_SUFFIX)
        self.card, self.header = card, header

    def read(self) -> tuple[list[Episode], float, list[dict[str, Any]]]:
        """Return the episodes so far, their seconds, and where they were played.

        A half-written line is dropped.

        Raises:
            ConfigError: If the file belongs to another evaluation or is damaged.
        """
        text = read_bytes(self.path).decode("utf-8", "replace")
        whole = text[: text.rfind("\n") + 1]
        first, *lines = whole.splitlines() or [""]
        advice = "Delete it and play again."
        origin = f"{self.path} is damaged, line"
        header = parse_json(first, Object, f"{origin} 1", advice=advice)
        check_same(self.header, header, self.path, ("shard", "protocol", "versions"))
        rows = [
            parse_json(line, EvalLine, f"{origin} {number}", advice=advice)
            for number, line in enumerate(lines, 2)
        ]
        if whole != text:  # the run was cut while it wrote
            self._write(whole)
        episodes = [from_row(row.episode) for row in rows]
        return episodes, rows[-1].seconds if rows else 0.0, [dict(row.world) for row in rows]

    def begin(self) -> None:
        """Write the first line."""
        self._write(json.dumps(self.header) + "\n")

    def append(self, episode: Episode, seconds: float, world: Mapping[str, Any]) -> None:
        """Add an episode, and facts for the card; it is in the file when this returns."""
        row = {"episode": to_row(episode), "seconds": round(seconds, 3), "world": dict(world)}
        line = json.dumps(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _write(self, text: str) -> None:
        with replacing(self.path) as draft:
            draft.write_text(text, encoding="utf-8")
