"""Sections about training: success, losses, throughput, staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_gym_trainers.report.curves import (
    GREEDY,
    TRAINING,
    Band,
    Curve,
    band,
    has_clock,
    metric,
    reference,
    seconds_of,
    success,
)
from vla_gym_trainers.report.data import Group, Run
from vla_gym_trainers.report.plots import Line, line_plot
from vla_gym_trainers.report.section import Pictures, Section, Table, Text, compact, legend_of

_TITLES = {
    GREEDY: "Greedy, on sampled layouts",
    TRAINING: "Training episodes, with exploration",
}
_BANDS = {
    "min..max": "lowest to highest of the seeds (line: their mean, thin: each of them)",
    "Wilson": "Wilson's 95 % interval where there is one run",
    "": "none where one run does not say of how many episodes",
}
# Counters and settings, no measures of learning.
_NO_LOSS = ("n_updates", "learning_rate", "replay_size", "minibatches", "updates", "tokens")
_STALENESS = ("async/staleness", "async/staleness_max", "async/ahead", "rollout/staleness")
_SMALL = (3.6, 2.0)


def success_section(groups: Sequence[Group]) -> tuple[Section, dict[str, Any]]:
    """Return success by steps and by wall time, and the numbers behind it by group."""
    section = Section("Success while training")
    numbers: dict[str, Any] = {group.label: {} for group in groups}
    scales, unit = _step_scales(groups, section.missing)
    bands_shown: set[str] = set()
    pictures = []
    for what, title in _TITLES.items():
        for by in ("steps", "seconds"):
            bands = _bands(groups, what, by, scales, section.missing)
            if not bands:
                continue
            for group, found in bands:
                bands_shown.add(found.kind)
                numbers[group.label].setdefault(what, {})[by] = _plain(found, unit, by)
            name = f"{title}, by {'wall time' if by == 'seconds' else unit}"
            pictures.append((name, _success_plot(name, bands, what, by, unit)))
    if pictures:
        legend = legend_of(groups)
        if any(reference(group) for group in groups):
            legend = type(legend)([*legend.entries, ("the frozen VLA on the same layouts", None)])
        says = "; ".join(text for kind, text in _BANDS.items() if kind in bands_shown)
        section.parts += [legend, Text(f"Bands: {says}."), Pictures(pictures)]
        section.parts.append(_numbers_table(numbers))
    if any(run.rows and not has_clock(run.rows) for group in groups for run in group.runs):
        section.missing.append(
            "Wall time of a run that logged no clock is told from the times of its logs: pauses "
            "before it was resumed count."
        )
    section.missing = list(dict.fromkeys(section.missing))
    return section, numbers


def _step_scales(groups: Sequence[Group], missing: list[str]) -> tuple[dict[str, float], str]:
    """Return the factor on the steps of each run (of those that have one) and their unit.

    Trainers on RL tokens count chunks, the others control steps. Together they are drawn by
    control steps, at most chunk_len a chunk: the last chunk of an episode may be shorter.
    """
    runs = [run for group in groups for run in group.runs]
    if all(run.counts_chunks for run in runs):
        return dict.fromkeys((run.name for run in runs), 1.0), "chunks"
    scales: dict[str, float] = {}
    for run in runs:
        length = run.chunk_len if run.counts_chunks else 1
        if length is None:
            missing.append(
                f"{run.name} counts chunks and neither its settings nor a card say how long "
                "they are: it is not drawn by control steps."
            )
        else:
            scales[run.name] = float(length)
    if any(run.counts_chunks for run in runs):
        missing.append(
            "Chunks are drawn as chunk_len control steps each; the last one of an episode may be "
            "shorter, so these runs took somewhat fewer."
        )
    return scales, "control steps"


def _bands(
    groups: Sequence[Group], what: str, by: str, scales: Mapping[str, float], missing: list[str]
) -> list[tuple[Group, Band]]:
    bands = []
    for group in groups:
        curves = {run.name: success(run, what) for run in group.runs}
        if without := [name for name, curve in curves.items() if curve is None]:
            missing.append(f"{_TITLES[what]}: nothing logged by {', '.join(without)}.")
        there = {name: curve for name, curve in curves.items() if curve is not None}
        if by == "steps":
            there = {name: curve for name, curve in there.items() if name in scales}
        elif timeless := [name for name, curve in there.items() if curve.seconds is None]:
            missing.append(f"No wall time (a card alone has none): {', '.join(timeless)}.")
            there = {name: curve for name, curve in there.items() if name not in timeless}
        if not there:
            continue
        found = band(list(there.values()), by, [scales.get(name, 1.0) for name in there])
        if found is None:
            missing.append(f"{_TITLES[what]}: the runs of {group.label} do not overlap by {by}.")
        else:
            bands.append((group, found))
    return bands


def _success_plot(
    name: str, bands: Sequence[tuple[Group, Band]], what: str, by: str, unit: str
) -> str:
    label, divisor = unit, 1.0
    if by == "seconds":
        label, divisor = _time_unit(max(float(found.x.max()) for _, found in bands))
    lines = []
    for group, found in bands:
        base = reference(group) if what == GREEDY else None
        if base is not None:
            ends = np.array([0.0, found.x[-1]]) / divisor
            lines.append(Line(None, ends, np.full(2, base)))
        lines.append(_line(group, found, divisor))
    return line_plot(name, lines, label, percent=True)


def _line(group: Group, found: Band, divisor: float = 1.0) -> Line:
    low, high = (found.low, found.high) if found.kind else (None, None)
    thin = tuple((x / divisor, y) for x, y in found.single)
    return Line(group.index, found.x / divisor, found.mean, low, high, thin)


def _time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which so long a time is drawn, and its length in seconds."""
    if seconds < 180:
        return "seconds of training", 1.0
    if seconds < 3 * 3600:
        return "minutes of training", 60.0
    return "hours of training", 3600.0


def _plain(found: Band, unit: str, by: str) -> dict[str, Any]:
    values = {"x": found.x, "mean": found.mean, "low": found.low, "high": found.high}
    rounded = {k: [float(f"{x:.6g}") for x in v.tolist()] for k, v in values.items()}
    return {"unit": unit if by == "steps" else "seconds", "band": found.kind, **rounded}


def _numbers_table(numbers: Mapping[str, Any]) -> Table:
    rows = []
    for label, curves in numbers.items():
        for what, axes in curves.items():
            for by in axes.values():
                best = int(np.argmax(by["mean"]))
                for name, i in (("first", 0), ("best", best), ("last", len(by["x"]) - 1)):
                    value = f"{100 * by['mean'][i]:.1f} %"
                    if by["band"]:
                        value += f" ({100 * by['low'][i]:.1f} .. {100 * by['high'][i]:.1f})"
                    rows.append((label, what, name, f"{compact(by['x'][i])} {by['unit']}", value))
    head = ("runs", "episodes", "point", "at", "success (band)")
    return Table(head, rows, folded="Numbers")


def losses_section(groups: Sequence[Group]) -> Section:
    """Return small plots of every ``train/*`` and ``phase/*`` number that changes."""
    section = Section("Losses")
    runs = [run for group in groups for run in group.runs]
    keys = {key for run in runs for row in run.rows for key in row}
    wanted = [k for k in keys if k.startswith("train/") and k.split("/")[1] not in _NO_LOSS]
    wanted += [key for key in keys if key.startswith("phase/")]
    pictures, constant, once = [], [], []
    for key in sorted(wanted):
        lines = [line for group in groups if (line := _metric_line(group, key))]
        if not lines:
            continue
        values = np.concatenate([line.y for line in lines])
        if max(len(line.x) for line in lines) == 1:
            once.append(f"{key} = {', '.join(map(compact, values.tolist()))}")
        elif np.ptp(values) == 0.0:
            constant.append(f"{key} = {compact(float(values[0]))}")
        else:
            unit = " | ".join(sorted({run.unit for run in runs}))
            pictures.append((key, line_plot(key, lines, unit, size=_SMALL)))
    if pictures:
        section.parts += [legend_of(groups), Pictures(pictures, "small")]
    if constant:
        section.missing.append(f"Never changed: {'; '.join(constant)}.")
    if once:
        section.missing.append(f"Logged only once: {'; '.join(once)}.")
    if without := [run.name for run in runs if not run.rows]:
        section.missing.append(f"No metrics.jsonl, so no losses: {', '.join(without)}.")
    return section


def _metric_line(group: Group, key: str) -> Line | None:
    curves = [curve for run in group.runs if (curve := metric(run, key))]
    found = band(curves) if curves else None
    return None if found is None else _line(group, found)


def throughput_section(groups: Sequence[Group]) -> Section:
    """Return speed over the run, totals, and where the time went."""
    section = Section("Throughput")
    runs = [run for group in groups for run in group.runs]
    pictures = []
    for unit in ("chunks", "control steps"):
        lines = []
        for group in groups:
            curves = [c for run in group.runs if run.unit == unit and (c := _speed(run))]
            if curves and (found := band(curves)):
                lines.append(_line(group, found))
        if lines:
            name = f"{unit} a second"
            pictures.append((name, line_plot(name, lines, unit, size=_SMALL)))
    if pictures:
        section.parts += [legend_of(groups), Pictures(pictures, "small")]
    if rows := [row for run in runs if (row := _totals(run))]:
        section.parts.append(Table(("run", "steps", "minutes", "a second", "episodes"), rows))
    shares = {run.name: time_shares(run) for run in runs}
    for name, parts in shares.items():
        if parts:
            total = sum(seconds for _, seconds in parts) or 1.0
            section.parts.append(Text(f"Where the time goes: {name}", "heading"))
            share_rows = [(part, f"{x / 60:.1f}", f"{100 * x / total:.0f} %") for part, x in parts]
            section.parts.append(Table(("part", "minutes", "share"), share_rows))
    if without := [name for name, parts in shares.items() if not parts]:
        section.missing.append(f"Where the time goes was not logged by {', '.join(without)}.")
    return section


def _speed(run: Run) -> Curve | None:
    """Return steps a second between logs."""
    seconds = seconds_of(run.rows)
    if seconds is None or len(run.rows) < 3:
        return None
    steps = np.array([row["step"] for row in run.rows], np.float64)
    # Evaluations log at a step that was logged before.
    keep = np.concatenate([[True], np.diff(np.maximum.accumulate(steps)) > 0])
    steps, seconds = steps[keep], seconds[keep]
    spans = np.diff(seconds)
    good = spans > 0.0
    if not good.any():
        return None
    return Curve(steps[1:][good], seconds[1:][good], np.diff(steps)[good] / spans[good])


def _totals(run: Run) -> tuple[str, ...] | None:
    training, unit = run.results.get("training", {}), run.unit
    steps = training.get("chunks", training.get("env_steps"))
    minutes, episodes = training.get("minutes"), training.get("episodes")
    if steps is None:
        seconds = seconds_of(run.rows)
        if seconds is None:
            return None
        steps, minutes, unit = run.rows[-1]["step"], float(seconds[-1]) / 60, f"{unit}, so far"
    speed = steps / (60.0 * minutes) if minutes else 0.0
    many = "-" if episodes is None else f"{episodes:,}"
    return run.name, f"{steps:,} {unit}", f"{minutes:.1f}", f"{speed:.2f}", many


def time_shares(run: Run) -> list[tuple[str, float]]:
    """Return the seconds of each part of a run's work; empty if it did not log them."""
    rows = [row for row in run.rows if "time/learn" in row and "time/rollout" in row]
    clock = seconds_of(run.rows)
    if not rows or clock is None:
        return []
    rollout, forward, learn, wait = (
        sum(float(row.get(f"time/{key}") or 0.0) for row in rows)
        for key in ("rollout", "forward", "learn", "wait")
    )
    if run.config.get("asynchronous") or run.config.get("ahead"):
        # Collecting goes on meanwhile: what counts is what the learner waits.
        parts = [("waiting for rollouts", wait), ("learning", learn)]
    else:
        collecting = ("environments and the rest of collecting", rollout - forward)
        parts = [("VLA, forward", forward), collecting, ("learning", learn)]
    rest = float(clock[-1]) - sum(seconds for _, seconds in parts)
    parts.append(("evaluation, checkpoints, start", rest))
    return [(name, max(0.0, seconds)) for name, seconds in parts]


def staleness_section(groups: Sequence[Group]) -> Section:
    """Return how old the weights were that acted: chunks by age, or what was logged over time."""
    section = Section("Staleness")
    without = []
    for group in groups:
        for run in group.runs:
            ages = run.results.get("training", {}).get("staleness_chunks")
            curves = {key: c for key in _STALENESS if (c := metric(run, key))}
            if not ages and not curves:
                without.append(run.name)
                continue
            section.parts.append(Text(run.name, "heading"))
            if ages:
                total = sum(ages.values()) or 1
                counts = sorted((int(age), int(count)) for age, count in ages.items())
                rows = [(str(a), f"{n:,} chunks", f"{100 * n / total:.1f} %") for a, n in counts]
                section.parts.append(Table(("updates old", "count", "share"), rows))
            else:
                pictures = [
                    (key, line_plot(key, [Line(group.index, c.steps, c.values)], run.unit))
                    for key, c in curves.items()
                ]
                section.parts.append(Pictures(pictures, "small"))
    if without:
        section.missing.append(f"No staleness logged: {', '.join(without)}.")
    return section
