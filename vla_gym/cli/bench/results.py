"""From raw rounds to medians, spreads, ratios and targets; pure functions over plain data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vla_gym.cli.bench.spec import Contender, Scenario, Target

Round = Mapping[str, Any]
Summary = dict[str, float]


def spread(values: Sequence[float]) -> Summary:
    """Return median, lowest and highest value."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
    }


def speed_round(plays: Sequence[Mapping[str, Any]], chunk_len: int) -> dict[str, float]:
    """Turn what a system played in one round into its figures.

    Args:
        plays: One mapping a play: ``steps``, ``seconds``, ``cpu_s``, ``ended``.
        chunk_len: Control steps that count as a chunk.

    Returns:
        ``rate`` and ``chunk_rate``: control steps and chunks a second in all environments;
        ``cpu_ms``: CPU milliseconds of all its processes a control step; ``ended``: episodes.
    """
    steps = sum(play["steps"] for play in plays)
    rate = steps / sum(play["seconds"] for play in plays)
    return {
        "rate": rate,
        "chunk_rate": rate / chunk_len,
        "cpu_ms": 1e3 * sum(play["cpu_s"] for play in plays) / steps,
        "ended": float(sum(play["ended"] for play in plays)),
    }


def summarise(
    scenario: Scenario,
    rounds: Mapping[str, Sequence[Round]],
    failed: Mapping[str, str],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a scenario's part of the report.

    Args:
        scenario: What was measured.
        rounds: Figures by contender and round; round k of one was measured beside round k of
            all others.
        failed: Why contenders are missing.
        notes: Remarks.

    Returns:
        ``contenders``: settings, a summary of every figure, and the rounds. ``ratios``: by
        contender and baseline, each figure of the contender over the baseline's of the same round.
        ``targets``: see :func:`judge`.
    """
    contenders = {}
    for contender in scenario.contenders:
        if done := rounds.get(contender.key):
            figures = {name: spread([r[name] for r in done]) for name in done[0]}
            contenders[contender.key] = {**_settings(contender), **figures, "rounds": list(done)}
    baselines = [key for key in scenario.baselines if key in contenders]
    ratios = {
        key: {base: _ratios(rounds[key], rounds[base]) for base in baselines} for key in contenders
    }
    report = {
        "key": scenario.key,
        "title": scenario.title,
        "kind": scenario.kind,
        "chunks": scenario.chunks,
        "baselines": baselines,
        "contenders": contenders,
        "ratios": ratios,
        "failed": dict(failed),
        "notes": list(notes),
    }
    return {**report, "targets": [judge(target, report) for target in scenario.targets]}


def _settings(contender: Contender) -> dict[str, Any]:
    return {
        "label": contender.label,
        "system": contender.system,
        "num_envs": contender.num_envs,
        "workers": contender.workers,
        "env": asdict(contender.env),
    }


def _ratios(rounds: Sequence[Round], base: Sequence[Round]) -> dict[str, Summary]:
    found = {}
    for name in sorted(rounds[0].keys() & base[0].keys()):
        pairs = zip(rounds, base, strict=False)
        if ratios := [a[name] / b[name] for a, b in pairs if b[name] > 0]:
            found[name] = spread(ratios)
    return found


def judge(target: Target, report: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a target with the median of its figure.

    Returns:
        The target, ``value`` (None if it was not measured) and ``met`` (None likewise).
    """
    found: Any = report
    for key in target.metric:
        found = found.get(key) if isinstance(found, Mapping) else None
    value = found["median"] if isinstance(found, Mapping) and "median" in found else None
    met = None
    if value is not None:
        met = value <= target.goal if target.at_most else value >= target.goal
    return {
        "scenario": report["key"],
        "text": target.text,
        "goal": target.goal,
        "at_most": target.at_most,
        "unit": target.unit,
        "value": value,
        "met": met,
    }
