"""What the page shows of training: success, losses, throughput, staleness; each plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_gym_trainers.report.curves import (
    GREEDY,
    TRAINING,
    Band,
    Curve,
    band,
    metric,
    reference,
    seconds_of,
    success,
)
from vla_gym_trainers.report.data import Group, Run
from vla_gym_trainers.report.plots import Line, line_plot

_TITLES = {
    GREEDY: "Greedy, on sampled layouts",
    TRAINING: "Training episodes, with exploration",
}
# Counters and settings, no measures of learning.
_NO_LOSS = ("n_updates", "learning_rate", "replay_size", "updates")
_STALENESS = ("async/staleness", "async/staleness_max", "rollout/staleness")
_BANDS = {
    "min..max": "lowest to highest of the seeds (line: their mean, thin: each of them)",
    "Wilson": "Wilson's 95 % interval where there is one run",
    "": "none where one run does not say of how many episodes",
}


def success_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return success by steps and by wall time.

    Returns:
        ``pictures`` (name, address); ``numbers``: behind them, by group, kind of curve and axis;
        ``bands``: what they are; ``missing``.
    """
    missing: list[str] = []
    pictures: list[tuple[str, str]] = []
    kinds: set[str] = set()
    numbers: dict[str, Any] = {group.label: {} for group in groups}
    for what, title in _TITLES.items():
        for by in ("steps", "seconds"):
            bands = _bands(groups, what, by, missing)
            if not bands:
                continue
            for group, found in bands:
                kinds.add(found.kind)
                unit = "control steps" if by == "steps" else "seconds"
                numbers[group.label].setdefault(what, {})[by] = _plain(found, unit)
            name = f"{title}, by {'wall time' if by == 'seconds' else 'control steps'}"
            label, divisor = ("control steps", 1.0) if by == "steps" else _time_unit(bands)
            lines: list[Line] = []
            for group, found in bands:
                if what == GREEDY and (base := reference(group)) is not None:
                    lines.append((None, Band(np.array([0.0, found.x[-1]]), np.full(2, base))))
                lines.append((group.index, found))
            plot = line_plot(name, lines, label, percent=True, unit=divisor, size=(5.0, 2.9))
            pictures.append((name, plot))
    return {
        "pictures": pictures,
        "numbers": numbers,
        "bands": "; ".join(text for kind, text in _BANDS.items() if kind in kinds),
        "has_reference": any(reference(group) is not None for group in groups),
        "missing": list(dict.fromkeys(missing)),
    }


def _bands(
    groups: Sequence[Group], what: str, by: str, missing: list[str]
) -> list[tuple[Group, Band]]:
    bands = []
    for group in groups:
        curves = {run.name: success(run, what) for run in group.runs}
        if without := [name for name, curve in curves.items() if curve is None]:
            missing.append(f"{_TITLES[what]}: nothing logged by {', '.join(without)}.")
        there = {name: curve for name, curve in curves.items() if curve is not None}
        timeless = [name for name, curve in there.items() if curve.seconds is None]
        if by == "seconds" and timeless:
            missing.append(f"No wall time (a card alone has none): {', '.join(timeless)}.")
            there = {name: curve for name, curve in there.items() if name not in timeless}
        if not there:
            continue
        found = band(list(there.values()), by)
        if found is None:
            missing.append(f"{_TITLES[what]}: the runs of {group.label} do not overlap by {by}.")
        else:
            bands.append((group, found))
    return bands


def _time_unit(bands: Sequence[tuple[Group, Band]]) -> tuple[str, float]:
    """Return the unit in which so long a time is drawn, and its length in seconds."""
    seconds = max(float(found.x.max()) for _, found in bands)
    if seconds < 180:
        return "seconds of training", 1.0
    if seconds < 3 * 3600:
        return "minutes of training", 60.0
    return "hours of training", 3600.0


def _plain(found: Band, unit: str) -> dict[str, Any]:
    def rounded(values: np.ndarray | None) -> list[float]:
        values = found.mean if values is None else values
        return [float(f"{x:.6g}") for x in values.tolist()]

    numbers = {"x": found.x, "mean": found.mean, "low": found.low, "high": found.high}
    return {"unit": unit, "band": found.kind} | {k: rounded(v) for k, v in numbers.items()}


def losses_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return small ``pictures`` of every ``train/*`` and ``phase/*`` number that changes."""
    runs = [run for group in groups for run in group.runs]
    keys = sorted({key for run in runs for row in run.rows for key in row})
    pictures, missing = [], []
    for key in keys:
        kind, _, name = key.partition("/")
        if kind != "phase" and (kind != "train" or name in _NO_LOSS):
            continue
        lines = _lines(groups, lambda run, key=key: metric(run, key))
        if lines and np.ptp(np.concatenate([found.mean for _, found in lines])) > 0.0:
            pictures.append((key, line_plot(key, lines, "control steps")))
    if without := [run.name for run in runs if not run.rows]:
        missing.append(f"No metrics.jsonl, so no losses: {', '.join(without)}.")
    return {"pictures": pictures, "missing": missing}


def _lines(groups: Sequence[Group], curve_of: Any) -> list[Line]:
    """Return a line of each group that has curves."""
    lines: list[Line] = []
    for group in groups:
        curves = [curve for run in group.runs if (curve := curve_of(run))]
        if curves and (found := band(curves)):
            lines.append((group.index, found))
    return lines


def throughput_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return ``pictures`` of the speed, ``totals``, and ``shares``: where the time went, by run."""
    runs = [run for group in groups for run in group.runs]
    pictures = []
    if lines := _lines(groups, _speed):
        name = "control steps a second"
        pictures.append((name, line_plot(name, lines, "control steps")))
    shares = {run.name: time_shares(run) for run in runs}
    missing = []
    if without := [name for name, parts in shares.items() if not parts]:
        missing.append(f"Where the time goes was not logged by {', '.join(without)}.")
    return {
        "pictures": pictures,
        "totals": [total for run in runs if (total := _totals(run))],
        "shares": {name: parts for name, parts in shares.items() if parts},
        "missing": missing,
    }


def _speed(run: Run) -> Curve | None:
    """Return control steps a second between logs."""
    if len(run.rows) < 3 or run.control_steps is None:
        return None
    seconds = seconds_of(run.rows)
    steps = run.control_steps * np.array([row["step"] for row in run.rows], np.float64)
    # Evaluations log at a step that was logged before.
    keep = np.concatenate([[True], np.diff(np.maximum.accumulate(steps)) > 0])
    steps, seconds = steps[keep], seconds[keep]
    spans = np.diff(seconds)
    good = spans > 0.0
    if not good.any():
        return None
    return Curve(steps[1:][good], seconds[1:][good], np.diff(steps)[good] / spans[good])


def _totals(run: Run) -> tuple[str, ...] | None:
    """Return name, steps, minutes, steps a second and episodes."""
    training, unit = run.results.get("training", {}), run.unit
    steps = training.get("chunks", training.get("env_steps"))
    minutes, episodes = training.get("minutes", 0.0), training.get("episodes")
    if steps is None:
        if not run.rows:
            return None
        steps, unit = run.rows[-1]["step"], f"{unit}, so far"
        minutes = float(seconds_of(run.rows)[-1]) / 60
    speed = steps / (60.0 * minutes) if minutes else 0.0
    many = "-" if episodes is None else f"{episodes:,}"
    return run.name, f"{steps:,} {unit}", f"{minutes:.1f}", f"{speed:.2f}", many


def time_shares(run: Run) -> list[tuple[str, float]]:
    """Return the seconds of each part of a run's work; empty if it did not log them."""
    rows = [row for row in run.rows if "time/learn" in row and "time/rollout" in row]
    if not rows:
        return []
    rollout, forward, learn, wait = (
        sum(float(row.get(f"time/{key}") or 0.0) for row in rows)
        for key in ("rollout", "forward", "learn", "wait")
    )
    if run.config.get("ahead"):
        # Collecting goes on meanwhile: what counts is what the learner waits.
        parts = [("waiting for rollouts", wait), ("learning", learn)]
    else:
        collecting = ("environments and the rest of collecting", rollout - forward)
        parts = [("VLA, forward", forward), collecting, ("learning", learn)]
    rest = float(seconds_of(run.rows)[-1]) - sum(seconds for _, seconds in parts)
    parts.append(("evaluation, checkpoints, start", rest))
    return [(name, max(0.0, seconds)) for name, seconds in parts]


def staleness_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return ``runs``: how old the weights were that acted, by run: ``ages`` or ``pictures``."""
    shown: dict[str, Any] = {}
    missing = []
    for group in groups:
        for run in group.runs:
            ages = run.results.get("training", {}).get("staleness_chunks", {})
            pictures = []
            for key in () if ages else _STALENESS:
                if curve := metric(run, key):
                    line = (group.index, Band(curve.steps, curve.values))
                    pictures.append((key, line_plot(key, [line], "control steps")))
            if ages or pictures:
                counts = sorted((int(age), int(count)) for age, count in ages.items())
                shown[run.name] = {"ages": counts, "pictures": pictures}
            else:
                missing.append(run.name)
    return {
        "runs": shown,
        "missing": [f"No staleness logged: {', '.join(missing)}."] if missing else [],
    }
