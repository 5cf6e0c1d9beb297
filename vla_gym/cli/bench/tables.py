"""The tables of a report: which figures stand where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_PARTS = {
    "physics_ms": "physics",
    "render_ms": "rendering",
    "python_ms": "Python in the environment",
    "between_ms": "between processes",
}


@dataclass(frozen=True)
class Table:
    """Cells of one table; the first column is text, the others are figures.

    Attributes:
        title: What it shows.
        headings: One a column.
        rows: Their cells.
        notes: Lines below it.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Return all tables of a report, in the order in which things were measured."""
    found = [table for scenario in report["scenarios"] for table in scenario_tables(scenario)]
    return [*found, *target_tables(report)]


def scenario_tables(scenario: Mapping[str, Any]) -> list[Table]:
    """Return the tables of one scenario."""
    makers: dict[str, tuple[Callable[[Mapping[str, Any]], Table], ...]] = {
        "speed": (_speed, _resets),
        "startup": (_startup,),
        "scaling": (_scaling,),
        "overhead": (_overhead,),
        "profile": (_profile,),
    }
    return [make(scenario) for make in makers[scenario["kind"]]]


def _number(value: float) -> str:
    """Three significant digits, thousands without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def _spread(summary: Mapping[str, float]) -> str:
    """Median, and half the range in percent of it."""
    median = summary["median"]
    half = 50 * (summary["high"] - summary["low"]) / median if median else 0.0
    return _number(median) if half == 0 else f"{_number(median)}±{half:.0f}%"


def _compared(scenario: Mapping[str, Any], what: str, limit: int | None = None) -> tuple[str, ...]:
    """Return a heading for each baseline, or for the first so many."""
    labels = [scenario["contenders"][key]["label"] for key in scenario["baselines"][:limit]]
    return tuple(f"{what} {label}" for label in labels)


def _ratios(
    scenario: Mapping[str, Any], key: str, figure: str, limit: int | None = None
) -> tuple[str, ...]:
    """Return a cell for each baseline, or for the first so many."""
    found = scenario["ratios"].get(key, {})
    return tuple(
        "1" if key == base else _spread(found[base][figure])
        for base in scenario["baselines"][:limit]
    )


def _notes(scenario: Mapping[str, Any]) -> tuple[str, ...]:
    missing = [f"Not measured: {message}" for message in scenario["failed"].values()]
    return (*missing, *scenario["notes"])


def _size(contender: Mapping[str, Any]) -> str:
    return f"{contender['num_envs']}/{contender['workers']}"


def _speed(scenario: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            c["label"],
            _size(c),
            _spread(c["rate"]),
            _number(c["chunk_rate"]["median"]),
            *_ratios(scenario, key, "rate"),
            _number(c["cpu_ms"]["median"]),
        )
        for key, c in scenario["contenders"].items()
    )
    headings = (
        "",
        "envs/ procs",
        "control steps/s",
        "chunks/s",
        *_compared(scenario, "times"),
        "CPU ms a step",
    )
    return Table(scenario["title"], headings, rows, _notes(scenario))


def _resets(scenario: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            c["label"],
            _size(c),
            _spread(c["reset_s"]),
            *_ratios(scenario, key, "reset_s", 1),
            _spread(c["reset_one_s"]),
        )
        for key, c in scenario["contenders"].items()
    )
    headings = ("", "envs/ procs", "all, s", *_compared(scenario, "part of", 1), "one, s")
    notes = [
        f"{c['label']}: without the ten no-op steps of an evaluation, which ours hold, "
        f"{_number(c['reset_plain_s']['median'])} s for all."
        for c in scenario["contenders"].values()
        if c["system"] == "libero"
    ]
    title = scenario["title"].replace("Speed", "Reset to a settled official state", 1)
    return Table(title, headings, rows, tuple(notes))


def _startup(scenario: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            c["label"],
            _size(c),
            _spread(c["start_s"]),
            *_ratios(scenario, key, "start_s"),
            _number(c["start_cpu_s"]["median"]),
            _number(c["pss_mb"]["median"]),
            _number(c["all_mb"]["median"]),
        )
        for key, c in scenario["contenders"].items()
    )
    headings = (
        "",
        "envs/ procs",
        "first obs., s",
        *_compared(scenario, "part of"),
        "CPU s",
        "PSS a worker, MB",
        "PSS all, MB",
    )
    return Table(scenario["title"], headings, rows, _notes(scenario))


def _scaling(scenario: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            c["label"],
            _spread(c["rate"]),
            *_ratios(scenario, key, "rate"),
            _number(c["cpu_ms"]["median"]),
            *_ratios(scenario, key, "cpu_ms"),
        )
        for key, c in scenario["contenders"].items()
    )
    headings = (
        "",
        "control steps/s",
        *_compared(scenario, "times"),
        "CPU ms a step",
        *_compared(scenario, "times"),
    )
    return Table(scenario["title"], headings, rows, _notes(scenario))


def _overhead(scenario: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            c["label"],
            _size(c),
            _spread(c["overhead_us"]),
            _number(c["overhead_p10_us"]["median"]),
            _number(c["beyond_envs_us"]["median"]),
        )
        for c in scenario["contenders"].values()
    )
    headings = ("", "envs/ procs", "us a call", "best tenth", "beyond envs, us")
    return Table(scenario["title"], headings, rows, _notes(scenario))


def _profile(scenario: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = []
    for c in scenario["contenders"].values():
        total = sum(c[part]["median"] for part in _PARTS)
        rows += [
            (name, _spread(c[part]), f"{100 * c[part]['median'] / total:.0f} %")
            for part, name in _PARTS.items()
        ]
    headings = ("", "ms a call of step", "share")
    return Table(scenario["title"], headings, tuple(rows), _notes(scenario))


def target_tables(report: Mapping[str, Any]) -> list[Table]:
    """Return one table of all figures that were asked for, or none."""
    rows = []
    for scenario in report["scenarios"]:
        for target in scenario["targets"]:
            unit = "" if target["unit"] == "x" else f" {target['unit']}"
            sign = "at most" if target["at_most"] else "at least"
            asked = f"{sign} {target['goal']:g}{unit}"
            value = "-" if target["value"] is None else f"{_number(target['value'])}{unit}"
            met = {True: "met", False: "missed", None: "not measured"}[target["met"]]
            rows.append((f"{scenario['key']}: {target['text']}", asked, value, met))
    return [Table("Targets", ("", "asked", "measured", ""), tuple(rows))] if rows else []
