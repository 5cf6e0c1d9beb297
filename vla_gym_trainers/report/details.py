"""The page's losses, throughput, shares of the time, and staleness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_gym_trainers.report.charts import Line, compact, legend, line_chart, share_bar
from vla_gym_trainers.report.curves import Band, Curve, band, clock_of, metric
from vla_gym_trainers.report.groups import Group
from vla_gym_trainers.report.markup import Markup, join, table, tag
from vla_gym_trainers.report.sources import Run

# Counters and settings, no measures of learning.
_NO_LOSS = ("n_updates", "learning_rate", "replay_size", "minibatches", "updates", "tokens")
_STALENESS = ("async/staleness", "async/staleness_max", "async/ahead", "rollout/staleness")


def losses_section(groups: Sequence[Group]) -> tuple[Markup, list[str]]:
    """Return small charts of every ``train/*`` number that changes, and what is missing."""
    runs = [run for group in groups for run in group.runs]
    keys = dict.fromkeys(key for run in runs for row in _all_rows(run) for key in row)
    wanted = [k for k in keys if k.startswith("train/") and k.split("/")[1] not in _NO_LOSS]
    wanted += [key for key in keys if key.startswith("phase/")]
    charts, constant, once = [], [], []
    for key in sorted(wanted):
        pairs = [(group, line) for group in groups for line in _lines(group, key)]
        if not pairs:
            continue
        lines = [line for _, line in pairs]
        values = np.concatenate([line.y for line in lines])
        if max(len(line.x) for line in lines) == 1:
            once.append(f"{key} = {', '.join(map(compact, values.tolist()))}")
        elif np.ptp(values) == 0.0:
            constant.append(f"{key} = {compact(float(values[0]))}")
        else:
            unit = _unit([run for group, _ in pairs for run in group.runs])
            charts.append(line_chart(key, lines, unit, small=True))
    missing = [f"Never changed: {'; '.join(constant)}."] if constant else []
    missing += [f"Logged only once: {'; '.join(once)}."] if once else []
    without = [run.name for run in runs if not any(_all_rows(run))]
    if without:
        missing.append(f"No metrics.jsonl, so no losses: {', '.join(without)}.")
    if not charts:
        return Markup(""), missing or ["No losses were logged."]
    return join([_legend(groups), tag("div", *charts, class_="charts small")]), missing


def _all_rows(run: Run) -> Sequence[dict[str, object]]:
    return [*run.rows, *(row for part in run.parts for row in part.rows)]


def _unit(runs: Sequence[Run]) -> str:
    kinds = {run.counts_chunks for run in runs}
    return " | ".join(
        name for name, is_it in (("chunks", True), ("steps", False)) if is_it in kinds
    )


def _legend(groups: Sequence[Group]) -> Markup:
    return legend([(group.label, group.index) for group in groups])


def _lines(group: Group, key: str) -> list[Line]:
    """Return a group's line; the tasks of a policy each are drawn as runs of it."""
    members = [part for run in group.runs for part in (run.parts or (run,))]
    curves = [curve for curve in (metric(run, key) for run in members) if curve is not None]
    found = band(curves) if curves else None
    return [] if found is None else [_line(group, found)]


def _line(group: Group, found: Band) -> Line:
    low, high = (found.low, found.high) if found.kind else (None, None)
    return Line(group.label, group.index, found.x, found.mean, low, high)


def throughput_section(groups: Sequence[Group]) -> tuple[Markup, list[str]]:
    """Return speed over the run, totals, and where the time went; and what is missing."""
    runs = [run for group in groups for run in group.runs]
    parts, missing = [], []
    charts = []
    for is_chunks, unit in ((True, "chunks"), (False, "control steps")):
        lines = []
        for group in groups:
            curves = [_speed(run) for run in group.runs if run.counts_chunks == is_chunks]
            found = band([c for c in curves if c]) if any(curves) else None
            if found is not None:
                lines.append(_line(group, found))
        if lines:
            charts.append(line_chart(f"{unit} a second", lines, unit, small=True))
    if charts:
        parts += [_legend(groups), tag("div", *charts, class_="charts small")]
    if rows := [row for run in runs if (row := _totals(run))]:
        parts.append(table(("run", "steps", "minutes", "a second", "episodes"), rows))
    timeless = []
    for run in runs:
        shares = time_shares(run)
        if shares:
            parts.append(tag("h3", f"Where the time goes: {run.name}"))
            parts.append(share_bar(shares))
        else:
            timeless.append(run.name)
    if timeless:
        missing.append(f"Where the time goes was not logged by {', '.join(timeless)}.")
    return join(parts), missing


def _speed(run: Run) -> Curve | None:
    """Return steps a second between logs."""
    seconds = clock_of(run)
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
    training = run.results.get("training", {})
    unit = "chunks" if run.counts_chunks else "control steps"
    episodes = training.get("episodes")
    steps = training.get("chunks", training.get("env_steps"))
    minutes = training.get("minutes")
    if run.parts or steps is None:
        parts = run.parts or (run,)
        logged = [part for part in parts if part.rows]
        if not logged:
            return None
        steps = sum(part.rows[-1]["step"] for part in logged)
        clocks = [clock_of(part) for part in logged]
        minutes = sum(float(clock[-1]) for clock in clocks if clock is not None) / 60.0
        unit += "" if run.card is not None else ", so far"
    speed = steps / (60.0 * minutes) if minutes else 0.0
    many = "-" if episodes is None else f"{episodes:,}"
    return run.name, f"{steps:,} {unit}", f"{minutes:.1f}", f"{speed:.2f}", many


def time_shares(run: Run) -> list[tuple[str, float]]:
    """Return the seconds of each part of a run's work; empty if it did not log them."""
    rows = [row for row in run.rows if "time/learn" in row and "time/rollout" in row]
    clock = clock_of(run)
    if not rows or clock is None:
        return []
    sums = {
        key: sum(float(row.get(f"time/{key}") or 0.0) for row in rows)
        for key in ("rollout", "forward", "learn", "wait")
    }
    if run.config.get("asynchronous"):
        # Collecting goes on meanwhile: what counts is what the learner waits.
        parts = [("waiting for rollouts", sums["wait"]), ("learning", sums["learn"])]
    else:
        parts = [
            ("VLA, forward", sums["forward"]),
            ("environments and the rest of collecting", sums["rollout"] - sums["forward"]),
        ]
        # A pipelined learner learns meanwhile: what counts is what collecting waits for it.
        pipelined = run.config.get("pipelined", False)
        parts.append(
            ("waiting for the learner", sums["wait"]) if pipelined else ("learning", sums["learn"])
        )
    rest = float(clock[-1]) - sum(seconds for _, seconds in parts)
    parts.append(("evaluation, checkpoints, start", rest))
    return [(name, max(0.0, seconds)) for name, seconds in parts]


def staleness_section(groups: Sequence[Group]) -> tuple[Markup, list[str]]:
    """Return histograms and curves of how old the acting weights were, and what is missing."""
    parts, without = [], []
    for group in groups:
        for run in group.runs:
            found = run.results.get("training", {}).get("staleness_chunks")
            if found:
                parts += [tag("h3", run.name), _histogram(found)]
                continue
            lines = [(key, metric(run, key)) for key in _STALENESS]
            unit = _unit([run])
            charts = [
                line_chart(
                    key, [Line(group.label, group.index, c.steps, c.values)], unit, small=True
                )
                for key, c in lines
                if c is not None
            ]
            if charts:
                parts += [tag("h3", run.name), tag("div", *charts, class_="charts small")]
            else:
                without.append(run.name)
    return join(parts), [f"No staleness logged: {', '.join(without)}."] if without else []


def _histogram(counts: dict[str, int]) -> Markup:
    total = sum(counts.values()) or 1
    rows = []
    for age, count in sorted((int(age), int(count)) for age, count in counts.items()):
        share = 100 * count / total
        rect = tag("rect", x=0, y=2, width=f"{share:.2f}%", height=10, rx=2)
        bar = tag("svg", tag("g", rect, class_="s0"), class_="bars", height=14)
        rows.append((f"{age}", bar, f"{count:,} chunks", f"{share:.1f} %"))
    return table(("updates old", "", "count", "share"), rows, "histogram")
