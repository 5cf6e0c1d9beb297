"""What the episodes of an evaluation add up to: a function of the episodes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym.rollout import Episode, Start
from vla_gym.suites import get_suite, get_task, suite_tasks
from vla_gym.suites.libero.suite import LiberoSuite
from vla_gym_trainers.evaluation.statistics import sign_test, wilson_interval

_COLUMNS = ("success", "terminated", "truncated", "length", "achieved", "achieved_step")


def summarize(episodes: Sequence[Episode], *, confusion: bool = False) -> dict[str, Any]:
    """Return the results part of a card, with ``confusion`` if the achieved goals were recorded.

    Returns:
        ``total``, ``suites``, ``tasks``, with ``confusion`` one entry a suite, and ``episodes``.
    """
    suites = {
        suite: [e for e in episodes if e.suite == suite]
        for suite in dict.fromkeys(e.suite for e in episodes)
    }
    results: dict[str, Any] = {
        "total": total(episodes),
        "suites": [{"suite": suite, **total(played)} for suite, played in suites.items()],
        "tasks": [
            {
                "suite": suite,
                "task_id": task_id,
                "instruction": get_task(suite, task_id).instruction,
                **counts(played),
            }
            for (suite, task_id), played in by_task(episodes).items()
        ],
    }
    if confusion:
        results["confusion"] = [
            confusion_of(suite, played)
            for suite, played in suites.items()
            if can_be_confused(suite)
        ]
    results["episodes"] = [to_row(episode) for episode in episodes]
    return results


def to_row(episode: Episode) -> dict[str, Any]:
    """Return an episode as plain JSON types."""
    start = episode.start
    place = {
        "suite": start.suite,
        "task_id": start.task_id,
        "init_state_id": start.init_state_id,
    }
    rare = {"seed": start.seed} if start.seed else {}
    rare |= {"replays": episode.replays} if episode.replays else {}
    return place | rare | {name: getattr(episode, name) for name in _COLUMNS}


def by_task(episodes: Iterable[Episode]) -> dict[tuple[str, int], list[Episode]]:
    """Return the episodes of each task, (suite, id), in the order in which they come."""
    found: dict[tuple[str, int], list[Episode]] = {}
    for episode in episodes:
        found.setdefault((episode.suite, episode.task_id), []).append(episode)
    return found


def counts(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return counts, rate, Wilson's 95 % interval and the mean length of the successes."""
    lengths = [episode.length for episode in episodes if episode.success]
    return {
        "num_episodes": len(episodes),
        "num_successes": len(lengths),
        "success_rate": len(lengths) / max(1, len(episodes)),
        "wilson_95": list(wilson_interval(len(lengths), len(episodes))),
        "mean_success_length": sum(lengths) / len(lengths) if lengths else None,
    }


def total(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return :func:`counts` over several tasks, and the unweighted mean of the tasks' rates."""
    rates = [counts(played)["success_rate"] for played in by_task(episodes).values()]
    mean = sum(rates) / max(1, len(rates))
    return {"num_tasks": len(rates), "mean_over_tasks": mean, **counts(episodes)}


def can_be_confused(suite: str) -> bool:
    """Tell whether a suite of LIBERO's has tasks that share a scene and differ in their goals."""
    goals: dict[str, set[str]] = {}
    for task in suite_tasks(suite):
        if isinstance(get_suite(task.suite), LiberoSuite):  # others' goals are not read
            goals.setdefault(task.scene_name, set()).add(task.goal)
    return any(len(different) > 1 for different in goals.values())


def confusion_of(suite: str, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the matrix instruction x achieved goal.

    Returns:
        ``matrix``: task id -> task id of the first goal that became true -> episodes; ``decided``:
        episodes in which one did; ``right``: those in which it was the instruction's;
        ``right_share`` of the decided (None if there are none) with ``wilson_95``.
    """
    decided = [e for e in episodes if e.achieved is not None]
    right = sum(e.achieved == e.task_id for e in decided)
    matrix: dict[str, dict[str, int]] = {}
    for task_id in sorted({e.task_id for e in episodes}):
        found = Counter(e.achieved for e in decided if e.task_id == task_id)
        matrix[str(task_id)] = {str(a): found[a] for a in sorted(a for a in found if a is not None)}
    return {
        "suite": suite,
        "num_episodes": len(episodes),
        "decided": len(decided),
        "right": right,
        "right_share": right / len(decided) if decided else None,
        "wilson_95": list(wilson_interval(right, len(decided))),
        "matrix": matrix,
    }


def check_paired(starts: Sequence[Start], other: Iterable[Episode]) -> None:
    """Check that another evaluation holds these states.

    Raises:
        ConfigError: If it lacks one.
    """
    theirs = {episode.start for episode in other}
    missing = [start for start in starts if start not in theirs]
    if missing:
        raise ConfigError(
            f"--paired: the other card lacks {len(missing)} of {len(starts)} episodes "
            f"({missing[0]}, ...): play both policies on the same suites, tasks, --layouts and "
            "--episodes."
        )


def compare(episodes: Sequence[Episode], other: Sequence[Episode]) -> dict[str, Any]:
    """Compare with another evaluation, on these states at least, state by state.

    Returns:
        ``tasks`` and ``total``: ``wins`` (only this one succeeded), ``losses``, ``both``,
        ``neither`` and the ``p_value`` of McNemar's exact test.

    Raises:
        ConfigError: If the other one lacks a state.
    """
    check_paired([episode.start for episode in episodes], other)
    theirs = {episode.start: episode.success for episode in other}

    def compared(mine: Sequence[Episode]) -> dict[str, Any]:
        pairs = Counter((episode.success, theirs[episode.start]) for episode in mine)
        wins, losses = pairs[True, False], pairs[False, True]
        return {
            "wins": wins,
            "losses": losses,
            "both": pairs[True, True],
            "neither": pairs[False, False],
            "p_value": sign_test(wins, losses),
        }

    tasks = [
        {"suite": suite, "task_id": task_id, **compared(mine)}
        for (suite, task_id), mine in by_task(episodes).items()
    ]
    return {"total": compared(episodes), "tasks": tasks}
