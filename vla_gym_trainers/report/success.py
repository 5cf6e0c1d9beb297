"""The page's success curves: by environment steps and by wall time, with bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_gym_trainers.report.charts import Line, compact, legend, line_chart
from vla_gym_trainers.report.curves import (
    GREEDY,
    TRAINING,
    Band,
    band,
    has_clock,
    reference,
    success,
)
from vla_gym_trainers.report.groups import Group
from vla_gym_trainers.report.markup import Markup, join, table, tag
from vla_gym_trainers.report.sources import Run

_TITLES = {
    GREEDY: "Greedy, on sampled layouts",
    TRAINING: "Training episodes, with exploration",
}
_SAYS = {
    "min..max": "lowest to highest of the seeds (line: their mean, thin: each of them)",
    "Wilson": "Wilson's 95 % interval where there is one run",
    "": "none where one run does not say of how many episodes",
}


def success_section(groups: Sequence[Group]) -> tuple[Markup, dict[str, Any], list[str]]:
    """Return the section's content, its numbers by group, and what is missing."""
    parts: list[Markup] = []
    missing: list[str] = []
    numbers: dict[str, Any] = {group.label: {} for group in groups}
    scales, unit = step_scales(groups, missing)
    kinds: set[str] = set()
    shown: dict[int, str] = {}
    for what in (GREEDY, TRAINING):
        charts = []
        for by in ("steps", "seconds"):
            bands = _bands(groups, what, by, scales, missing)
            for group, found in bands:
                kinds.add(found.kind)
                shown[group.index] = group.label
                numbers[group.label].setdefault(what, {})[by] = _plain(found, unit, by)
            if bands:
                charts.append(_chart(bands, what, by, unit))
        if charts:
            parts.append(tag("div", *charts, class_="charts"))
    if parts:
        entries: list[tuple[str, int | None]] = [(label, i) for i, label in sorted(shown.items())]
        if any(reference(group) for group in groups):
            entries.append(("the frozen VLA on the same layouts", None))
        says = "; ".join(text for kind, text in _SAYS.items() if kind in kinds)
        parts = [legend(entries), tag("p", f"Bands: {says}.", class_="note"), *parts]
        parts.append(_numbers_table(numbers))
    if any(run.rows and not has_clock(run.rows) for group in groups for run in group.runs):
        missing.append(
            "Wall time of a run that logged no clock is told from the times of its logs: pauses "
            "before it was resumed count."
        )
    return join(parts), numbers, list(dict.fromkeys(missing))


def step_scales(groups: Sequence[Group], missing: list[str]) -> tuple[dict[str, float | None], str]:
    """Return the factor on each run's steps (None: it cannot be told) and their unit.

    Trainers on RL tokens count chunks, the others control steps. Together they are drawn by
    control steps, at most chunk_len a chunk: the last chunk of an episode may be shorter.
    """
    runs = [run for group in groups for run in group.runs]
    if all(run.counts_chunks for run in runs):
        return dict.fromkeys((run.name for run in runs), 1.0), "chunks"
    scales: dict[str, float | None] = {}
    for run in runs:
        scales[run.name] = 1.0 if not run.counts_chunks else _chunk_len(run)
        if scales[run.name] is None:
            missing.append(
                f"{run.name} counts chunks and neither its settings nor a card say how long "
                "they are: it is not drawn by control steps."
            )
    if any(run.counts_chunks for run in runs):
        missing.append(
            "Chunks are drawn as chunk_len control steps each; the last one of an episode may be "
            "shorter, so these runs took somewhat fewer."
        )
    return scales, "control steps"


def _chunk_len(run: Run) -> float | None:
    return None if run.chunk_len is None else float(run.chunk_len)


def _bands(
    groups: Sequence[Group],
    what: str,
    by: str,
    scales: dict[str, float | None],
    missing: list[str],
) -> list[tuple[Group, Band]]:
    bands = []
    for group in groups:
        pairs = [(run, success(run, what)) for run in group.runs]
        without = [run.name for run, curve in pairs if curve is None]
        if without:
            missing.append(f"{_TITLES[what]}: nothing logged by {', '.join(without)}.")
        there = [(run, curve) for run, curve in pairs if curve is not None]
        if by == "steps":
            there = [(run, curve) for run, curve in there if scales[run.name] is not None]
        else:
            timeless = [run.name for run, curve in there if curve.seconds is None]
            if timeless:
                missing.append(f"No wall time (a card alone has none): {', '.join(timeless)}.")
            there = [(run, curve) for run, curve in there if curve.seconds is not None]
        if not there:
            continue
        found = band([c for _, c in there], by, [scales[run.name] or 1.0 for run, _ in there])
        if found is None:
            missing.append(f"{_TITLES[what]}: the runs of {group.label} do not overlap by {by}.")
        else:
            bands.append((group, found))
    return bands


def _chart(bands: Sequence[tuple[Group, Band]], what: str, by: str, unit: str) -> Markup:
    label, divisor = unit, 1.0
    if by == "seconds":
        label, divisor = time_unit(max(float(found.x.max()) for _, found in bands))
    lines = []
    if what == GREEDY:
        for group, found in bands:
            if (base := reference(group)) is not None:
                ends = np.array([0.0, found.x[-1]]) / divisor
                lines.append(Line(base[0], None, ends, np.full(2, base[1])))
    for group, found in bands:
        has_band = bool(found.kind)
        lines.append(
            Line(
                group.label,
                group.index,
                found.x / divisor,
                found.mean,
                found.low if has_band else None,
                found.high if has_band else None,
                tuple((x / divisor, y) for x, y in found.single),
            )
        )
    title = f"{_TITLES[what]}, by {'wall time' if by == 'seconds' else unit}"
    return line_chart(title, lines, label, percent=True)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which so long a time is drawn, and its length in seconds."""
    if seconds < 180:
        return "seconds of training", 1.0
    if seconds < 3 * 3600:
        return "minutes of training", 60.0
    return "hours of training", 3600.0


def _plain(found: Band, unit: str, by: str) -> dict[str, Any]:
    return {
        "unit": unit if by == "steps" else "seconds",
        "band": found.kind,
        "x": _rounded(found.x),
        "mean": _rounded(found.mean),
        "low": _rounded(found.low),
        "high": _rounded(found.high),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _numbers_table(numbers: dict[str, Any]) -> Markup:
    rows = []
    for label, curves in numbers.items():
        for what, axes in curves.items():
            for by in axes.values():
                best = int(np.argmax(by["mean"]))
                points = [("first", 0), ("best", best), ("last", len(by["x"]) - 1)]
                for name, i in points:
                    value = f"{100 * by['mean'][i]:.1f} %"
                    if by["band"]:
                        value += f" ({100 * by['low'][i]:.1f} .. {100 * by['high'][i]:.1f})"
                    rows.append((label, what, name, f"{compact(by['x'][i])} {by['unit']}", value))
    head = ("runs", "episodes", "point", "at", "success (band)")
    return tag("details", tag("summary", "Numbers"), table(head, rows))
