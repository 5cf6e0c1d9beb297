"""Curves of runs: what was logged, by steps and by seconds, with bands over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_gym.suites import suite_tasks
from vla_gym_trainers.evaluation.statistics import wilson_interval
from vla_gym_trainers.report.data import Group, Row, Run

GREEDY, TRAINING = "greedy", "training"
#: Kind of curve -> keys that hold it, in the order of preference.
SUCCESS_KEYS = {
    GREEDY: ("eval/success",),
    TRAINING: ("rollout/success", "rollout/success_rate"),
}
REFERENCE_KEYS = ("eval/vla_success", "eval/teacher_success")
# Training episodes that rollout/success_rate is the mean of; keys that count them, the last one
# those that do not belong to it too.
_WINDOW = 100
_COUNTS = ("rollout/success_episodes", "rollout/episodes", "time/episodes")
# Points of a drawn line.
_MOST_POINTS = 150


@dataclass(frozen=True)
class Curve:
    """Values of one run.

    Attributes:
        steps: (n,) control steps so far.
        seconds: (n,) of training so far, or None if nothing tells.
        values: (n,).
        episodes: (n,) that each value is the rate of; None if it is no rate.
    """

    steps: np.ndarray
    seconds: np.ndarray | None
    values: np.ndarray
    episodes: np.ndarray | None = None


@dataclass(frozen=True)
class Band:
    """A line of a plot: a group's mean, and how far its runs lie apart.

    Attributes:
        x: (n,) steps or seconds.
        mean: (n,).
        low, high: (n,) of the band; None without one.
        kind: ``"min..max"`` over runs, ``"Wilson"`` of one run's rates, ``""`` for none.
        single: x and values of each run, where there are several.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    kind: str = ""
    single: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


def seconds_of(rows: Sequence[Row]) -> np.ndarray:
    """Return the seconds of training at each row, pauses before a run was resumed left out.

    Rows without a clock (``time/seconds``, or ``time/time_elapsed``, which begins anew in each
    process) are placed between the others by their wall time. If no row has one, the seconds are
    those since the first row, pauses included.
    """
    wall = np.array([row["wall_s"] for row in rows], np.float64)
    clocks = [row.get("time/seconds", row.get("time/time_elapsed")) for row in rows]
    known = [i for i, clock in enumerate(clocks) if clock is not None]
    if not known:
        return wall - wall[:1]
    clock = np.array([clocks[i] for i in known], np.float64)
    clock[1:] += np.cumsum(np.where(np.diff(clock) < 0.0, clock[:-1], 0.0))
    at = wall[known]
    seconds = np.interp(wall, at, clock)
    seconds += np.minimum(wall - at[0], 0.0) + np.maximum(wall - at[-1], 0.0)
    return np.asarray(np.maximum(seconds, 0.0))


def metric(run: Run, key: str) -> Curve | None:
    """Return a logged number of a run; None if it was never logged."""
    found = [i for i, row in enumerate(run.rows) if isinstance(row.get(key), int | float)]
    if not found or run.control_steps is None:
        return None
    steps = run.control_steps * np.array([run.rows[i]["step"] for i in found], np.float64)
    values = np.array([run.rows[i][key] for i in found], np.float64)
    return Curve(steps, seconds_of(run.rows)[found], values)


def success(run: Run, kind: str) -> Curve | None:
    """Return a success curve: ``GREEDY`` evaluations while training, or ``TRAINING`` episodes."""
    for key in SUCCESS_KEYS[kind]:
        if curve := metric(run, key):
            if kind == GREEDY:
                episodes = np.full(len(curve.values), float(_eval_episodes(run)))
            else:
                rows = [row for row in run.rows if row.get(key) is not None]
                played = [next((row[name] for name in _COUNTS if name in row), 0) for row in rows]
                most = _WINDOW if key == "rollout/success_rate" else np.inf
                episodes = np.minimum(most, np.array(played, np.float64))
            return replace(curve, episodes=episodes)
    return _from_card(run, kind)


def _eval_episodes(run: Run) -> int:
    tasks = run.config.get("task_ids")
    count = len(suite_tasks(run.config.get("suite", "?"))) if tasks is None else len(tasks)
    return int(run.config.get("eval_layouts", 0)) * count


def _from_card(run: Run, kind: str) -> Curve | None:
    """Return the curve that a result card holds: no seconds in it."""
    training = run.results.get("training", {})
    if kind == GREEDY:
        history = run.results.get("validation", training.get("closed_loop", {})).get("history", [])
    else:
        history = training.get("success", [])
    if not history or run.control_steps is None:
        return None
    steps, values = np.array([row[:2] for row in history], np.float64).T
    count = _eval_episodes(run) if kind == GREEDY else 0
    return Curve(run.control_steps * steps, None, values, np.full(len(values), float(count)))


def reference(group: Group) -> float | None:
    """Return what the curves of evaluations start from: success of the frozen VLA."""
    for key in REFERENCE_KEYS:
        curves = [curve for run in group.runs if (curve := metric(run, key))]
        if curves:
            return float(np.mean([curve.values[-1] for curve in curves]))
    return None


def band(curves: Sequence[Curve], by: str = "steps") -> Band | None:
    """Put the curves of a group, one of each run, together, by ``"steps"`` or ``"seconds"``.

    Returns:
        Of one run, its values with Wilson's intervals if they are rates; of several, mean, lowest
        and highest as far as all of them go. None if the runs do not overlap.
    """
    lines = [(getattr(curve, by), curve.values) for curve in curves]
    if len(lines) > 1:
        return _band_over_runs([_thinned(*line) for line in lines])
    (x, values), episodes = lines[0], curves[0].episodes
    if episodes is None or not episodes.all():
        return Band(*_thinned(x, values))
    bounds = [
        wilson_interval(round(v * n), int(n))
        for v, n in zip(values.tolist(), episodes.tolist(), strict=True)
    ]
    low, high = np.array(bounds, np.float64).T
    keep = _some(len(x))
    return Band(x[keep], values[keep], low[keep], high[keep], "Wilson")


def _band_over_runs(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band | None:
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[(grid >= first) & (grid <= last)]
    if not len(grid):
        return None
    grid = grid[_some(len(grid))]
    values = np.stack([np.interp(grid, x, y) for x, y in lines])
    return Band(grid, values.mean(0), values.min(0), values.max(0), "min..max", tuple(lines))


def _some(count: int) -> np.ndarray:
    """Return indices of as many points, evenly spread, as can be seen."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int))


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means of neighbours where there are more points than can be seen."""
    if len(x) <= _MOST_POINTS:
        return x, y
    parts = zip(np.array_split(x, _MOST_POINTS), np.array_split(y, _MOST_POINTS), strict=True)
    means = np.array([(a.mean(), b.mean()) for a, b in parts])
    return means[:, 0], means[:, 1]
