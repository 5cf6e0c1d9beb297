"""Curves of runs: what was logged, by steps and by seconds, with bands over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.statistics import wilson_interval
from vla_gym_trainers.report.data import Group, Row, Run

GREEDY, TRAINING = "greedy", "training"
#: Kind of curve -> keys that hold it, in the order of preference.
SUCCESS_KEYS = {
    GREEDY: ("eval/success",),
    TRAINING: ("rollout/success", "rollout/success_rate"),
}
REFERENCE_KEYS = ("eval/vla_success", "eval/teacher_success")
# Environments of evaluations while td3 trains (train_td3.EVAL_ENVS).
_EVAL_ENVS = 8
# Training episodes that rollout/success_rate is the mean of.
_WINDOW = 100
# Points of a drawn line.
_MOST_POINTS = 150


@dataclass(frozen=True)
class Curve:
    """Values of one run.

    Attributes:
        steps: (n,) chunks or control steps, as the run counts them.
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
    """A group's curve: the mean of its runs, and how far they lie apart.

    Attributes:
        x: (n,) steps or seconds.
        mean, low, high: (n,); without a band, all three are the same.
        kind: ``"min..max"`` over runs, ``"Wilson"`` of one run's rates, ``""`` for none.
        single: x and values of each run, where there are several.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    kind: str
    single: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


def seconds_of(rows: Sequence[Row]) -> np.ndarray | None:
    """Return the seconds of training at each row, pauses before a run was resumed left out.

    Rows without a clock (``time/seconds``, or ``time/time_elapsed``, which begins anew in each
    process) are placed between the others by their wall time. If no row has one, the seconds are
    those since the first row, pauses included.
    """
    if not rows:
        return None
    wall = np.array([row["wall_s"] for row in rows], np.float64)
    if not has_clock(rows):
        return wall - wall[0]
    known = [i for i, row in enumerate(rows) if has_clock([row])]
    clock = np.array(
        [rows[i].get("time/seconds", rows[i].get("time/time_elapsed")) for i in known], np.float64
    )
    clock[1:] += np.cumsum(np.where(np.diff(clock) < 0.0, clock[:-1], 0.0))
    at = wall[known]
    seconds = np.interp(wall, at, clock)
    seconds += np.minimum(wall - at[0], 0.0) + np.maximum(wall - at[-1], 0.0)
    return np.asarray(np.maximum(seconds, 0.0))


def has_clock(rows: Sequence[Row]) -> bool:
    """Tell whether :func:`seconds_of` can leave pauses out."""
    return any("time/seconds" in row or "time/time_elapsed" in row for row in rows)


def metric(run: Run, key: str) -> Curve | None:
    """Return a logged number of a run; None if it was never logged."""
    seconds = seconds_of(run.rows)
    found = [i for i, row in enumerate(run.rows) if isinstance(row.get(key), int | float)]
    if not found or seconds is None:
        return None
    steps = np.array([run.rows[i]["step"] for i in found], np.float64)
    return Curve(steps, seconds[found], np.array([run.rows[i][key] for i in found], np.float64))


def success(run: Run, kind: str) -> Curve | None:
    """Return a success curve: ``GREEDY`` evaluations while training, or ``TRAINING`` episodes."""
    for key in SUCCESS_KEYS[kind]:
        if curve := metric(run, key):
            if not ((curve.values >= 0.0) & (curve.values <= 1.0)).all():
                worst = curve.values[np.argmax(abs(curve.values - 0.5))]
                raise ConfigError(f"{run.path} is damaged: a success rate cannot be {worst:g}.")
            return replace(curve, episodes=_episodes(run, kind, key, curve))
    return _from_card(run, kind)


def _episodes(run: Run, kind: str, key: str, curve: Curve) -> np.ndarray:
    count = len(curve.values)
    if kind == GREEDY:
        return np.full(count, _eval_episodes(run))
    rows = [row for row in run.rows if isinstance(row.get(key), int | float)]
    if key == "rollout/success":
        return np.array([float(row.get("rollout/episodes", 0)) for row in rows])
    played = [row.get("rollout/episodes", row.get("time/episodes", 0)) for row in rows]
    return np.minimum(_WINDOW, np.array(played, np.float64))


def _eval_episodes(run: Run) -> int:
    tasks = run.config.get("task_ids")
    if tasks is None:
        from vla_gym.suites import suite_tasks

        tasks = suite_tasks(run.config["suite"])
    envs = int(run.config.get("eval_envs", _EVAL_ENVS))
    return -(-int(run.config.get("eval_layouts", 0)) * len(tasks) // envs) * envs


def _from_card(run: Run, kind: str) -> Curve | None:
    """Return the curve that a result card holds: no seconds in it."""
    training = run.results.get("training", {})
    if kind == GREEDY:
        history = run.results.get("validation", training.get("closed_loop", {})).get("history", [])
        pairs = [(float(row[0]), float(row[1])) for row in history]
        episodes = np.full(len(pairs), _eval_episodes(run))
    else:
        pairs = [(float(step), float(rate)) for step, rate in training.get("success", [])]
        episodes = np.zeros(len(pairs))
    if not pairs:
        return None
    steps, values = np.array(pairs, np.float64).T
    return Curve(steps, None, values, episodes)


def reference(group: Group) -> float | None:
    """Return what the curves of evaluations start from: success of the frozen VLA."""
    for key in REFERENCE_KEYS:
        curves = [metric(run, key) for run in group.runs]
        values = [curve.values[-1] for curve in curves if curve is not None]
        if values:
            return float(np.mean(values))
    return None


def band(
    curves: Sequence[Curve], by: str = "steps", scales: Sequence[float] | None = None
) -> Band | None:
    """Put the curves of a group together.

    Args:
        curves: One of each run.
        by: ``"steps"`` or ``"seconds"``.
        scales: Factor on the steps of each run, to make control steps of chunks.

    Returns:
        Of one run, its values with Wilson's intervals if they are rates; of several, mean, lowest
        and highest as far as all of them go. None if a run has no seconds.
    """
    lines = []
    for curve, scale in zip(curves, scales or [1.0] * len(curves), strict=True):
        x = curve.steps * scale if by == "steps" else curve.seconds
        if x is None:
            return None
        lines.append((x, curve.values))
    if len(lines) > 1:
        return _band_over_runs([_thinned(*line) for line in lines])
    (x, values), episodes = lines[0], curves[0].episodes
    if episodes is None or not episodes.all():
        x, values = _thinned(x, values)
        return Band(x, values, values, values, "")
    bounds = [
        wilson_interval(round(v * n), n)
        for v, n in zip(values.tolist(), episodes.astype(int).tolist(), strict=True)
    ]
    low, high = np.array(bounds, np.float64).T
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).round().astype(int))
    return Band(x[keep], values[keep], low[keep], high[keep], "Wilson")


def _band_over_runs(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band | None:
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[(grid >= first) & (grid <= last)]
    if not len(grid):
        return None
    keep = np.unique(np.linspace(0, len(grid) - 1, min(len(grid), _MOST_POINTS)).round())
    grid = grid[keep.astype(int)]
    values = np.stack([np.interp(grid, x, y) for x, y in lines])
    mean, low, high = values.mean(0), values.min(0), values.max(0)
    return Band(grid, mean, low, high, "min..max", tuple(lines))


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means of neighbours where there are more points than can be seen."""
    if len(x) <= _MOST_POINTS:
        return x, y
    parts = zip(np.array_split(x, _MOST_POINTS), np.array_split(y, _MOST_POINTS), strict=True)
    means = np.array([(a.mean(), b.mean()) for a, b in parts])
    return means[:, 0], means[:, 1]
