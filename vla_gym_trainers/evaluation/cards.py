"""Result cards of evaluations: made, read, gone on with, merged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym.rollout import Episode, Start
from vla_gym_trainers.evaluation.episodes import from_row, to_row
from vla_gym_trainers.evaluation.summary import compare, summarize
from vla_gym_trainers.runs.result_card import to_plain

KIND, SCHEMA = "eval", 2
CARD_FILE, ROWS_SUFFIX = "card.json", ".rows.jsonl"


@dataclass(frozen=True)
class EvalCard:
    """A card that was read from a file.

    Attributes:
        path: The file.
        content: All of it.
        episodes: Its episodes.
    """

    path: Path
    content: dict[str, Any]
    episodes: tuple[Episode, ...]

    @property
    def protocol(self) -> dict[str, Any]:
        """What was played, by whom, how: all that the results depend on, but for versions."""
        protocol: dict[str, Any] = self.content["protocol"]
        return protocol


def card_path(out: Path) -> Path:
    """Return the file of the card: ``out`` itself if it ends in .json, else ``out/card.json``."""
    return out if out.suffix == ".json" else out / CARD_FILE


def films_folder(out: Path) -> Path:
    """Return the folder of the films."""
    return out.with_suffix(".films") if out.suffix == ".json" else out / "films"


def check_out(out: Path, *, resume: bool) -> None:
    """Check that a card can be written.

    Args:
        out: A directory or a .json file.
        resume: Whether what an earlier run left there is welcome.

    Raises:
        ConfigError: If it cannot, or an earlier run's would be overwritten.
    """
    file = card_path(out)
    left = [file, RowsFile(file, {}).path]
    if not resume and any(path.exists() for path in left):
        raise ConfigError(
            f"{next(path for path in left if path.exists())} is there already: add --resume to go "
            "on with that run, or choose another --out."
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        trial = file.parent / f".{file.name}.trial"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error}).") from error


def read_card(path: Path) -> EvalCard:
    """Read a card.

    Args:
        path: The file, or the directory that holds ``card.json``.

    Raises:
        ConfigError: If there is none, or it is not one of ``vla-gym eval``.
    """
    file = path / CARD_FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a result card: {error}") from error
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind != KIND or content.get("schema") != SCHEMA:
        raise ConfigError(
            f"{file} is no result card of vla-gym eval: expected kind {KIND!r} and schema "
            f"{SCHEMA}, got {kind!r} and {content.get('schema') if kind else None}."
        )
    try:
        rows = content["results"]["episodes"]
        missing = [key for key in ("protocol", "versions", "environment") if key not in content]
        if missing:
            raise KeyError(*missing)
        return EvalCard(file, content, tuple(from_row(row) for row in rows))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error!r}. Evaluate again.") from error


def starts_of(protocol: Mapping[str, Any]) -> tuple[Start, ...]:
    """Return every start that a protocol asks for, in the order of its card."""
    return tuple(
        Start(suite, task_id, state)
        for suite, task_ids in protocol["tasks"].items()
        for task_id in task_ids
        for state in range(protocol["episodes"])
    )


def world_of(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a card's environment that the protocol fixes."""
    return {
        "asset_pack": protocol["assets"]["name"],
        "asset_pack_digest": protocol["assets"]["digest"],
        "physics": protocol["physics"],
        "chunk_len": protocol["chunk_len"],
    }


def results_of(
    episodes: Sequence[Episode], protocol: Mapping[str, Any], other: EvalCard | None
) -> dict[str, Any]:
    """Return the results of episodes in any order, with the comparison if there is another card.

    Raises:
        ConfigError: If the other card lacks a state.
    """
    order = {start: index for index, start in enumerate(starts_of(protocol))}
    episodes = sorted(episodes, key=lambda episode: order[episode.start])
    results = summarize(episodes, confusion=protocol["confusion"])
    if other is not None:
        results["paired"] = {
            "with": str(other.path),
            "policy": other.protocol["policy"],
            **compare(episodes, other.episodes),
        }
    return results


def check_comparable(protocol: Mapping[str, Any], other: EvalCard) -> None:
    """Check that another card was made in the same world.

    Raises:
        ConfigError: If assets or physics differ.
    """
    for key in ("assets", "physics"):
        if other.protocol.get(key) != protocol[key]:
            raise ConfigError(
                f"--paired needs the same {key}, got {protocol[key]} here and "
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


def check_same(header: Mapping[str, Any], found: Mapping[str, Any], path: Path) -> None:
    """Check that what an earlier run left is of the same shard, protocol and versions.

    Args:
        header: Of this run.
        found: What the file holds.
        path: The file.

    Raises:
        ConfigError: If it is not.
    """
    keys = ("shard", "protocol", "versions")
    what = difference({k: header.get(k) for k in keys}, {k: found.get(k) for k in keys})
    if what:
        raise ConfigError(
            f"{path} is of another evaluation; they differ in {what}. Use the same options and "
            "versions, or another --out."
        )


def merge(cards: Sequence[EvalCard], *, partial: bool) -> tuple[Episode, ...]:
    """Return the episodes of cards that are parts of one evaluation.

    Args:
        cards: At least one.
        partial: Accept that episodes are missing.

    Raises:
        ConfigError: If they do not fit together, an episode is there twice, or one is missing.
    """
    first = cards[0]
    for card in cards[1:]:
        for what in ("protocol", "versions"):
            if found := difference(first.content[what], card.content[what], f"{what}."):
                raise ConfigError(
                    f"{first.path} and {card.path} are not parts of one evaluation; they differ "
                    f"in {found}."
                )
    wanted = starts_of(first.protocol)
    known = set(wanted)
    source: dict[Start, Path] = {}
    for card in cards:
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
        """Name the file.

        Args:
            card: The card's file.
            header: What is played; only a run with the same one may go on.
        """
        self.path = card.with_name(card.name.removesuffix(".json") + ROWS_SUFFIX)
        self._header = to_plain(header)

    def read(self) -> tuple[list[Episode], float]:
        """Return the episodes so far and the seconds they took; a half-written line is dropped.

        Raises:
            ConfigError: If the file belongs to another evaluation or is damaged.
        """
        lines = self.path.read_text(encoding="utf-8").split("\n")
        if lines[-1]:  # the run was cut while it wrote
            lines[-1] = ""
            self._write("\n".join(lines))
        episodes: list[Episode] = []
        seconds = 0.0
        try:
            header, *rows = [json.loads(line) for line in lines if line]
            if not isinstance(header, dict):
                raise ValueError("its first line is no JSON object")
            check_same(self._header, header, self.path)
            for row in rows:
                episodes.append(from_row(row["episode"]))
                seconds = float(row["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self.path} is damaged ({error}): delete it and play again."
            ) from error
        return episodes, seconds

    def begin(self) -> None:
        """Write the first line."""
        self._write(json.dumps(self._header) + "\n")

    def append(self, episode: Episode, seconds: float) -> None:
        """Add an episode; it is in the file when this returns."""
        line = json.dumps({"episode": to_row(episode), "seconds": round(seconds, 3)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self.path)
