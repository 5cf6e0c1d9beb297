"""Final evaluations on the official states: policies against the VLA, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.cards import EvalCard, check_comparable
from vla_gym_trainers.evaluation.summary import compare
from vla_gym_trainers.evaluation.tables import policy_name
from vla_gym_trainers.report.data import Group, Run

#: One policy on official states, as it goes into the page's data. ``name``: of the run or card;
#: ``policy``, ``baseline``: who played, baseline None: nothing to compare with; ``colour``: of its
#: group, None for the VLA itself; ``tasks``, ``total``: see :func:`_outcome`; ``mean_over_tasks``,
#: ``baseline_mean_over_tasks``; ``note``: what else must be said.
Evaluation = dict[str, Any]


def collect(
    groups: Sequence[Group], cards: Sequence[tuple[str, EvalCard]]
) -> tuple[list[Evaluation], list[str]]:
    """Return every evaluation, and sentences about what is missing."""
    found, missing = [], []
    for group in groups:
        for run in group.runs:
            evaluation = of_run(run, group.index)
            if evaluation is None:
                why = "it has no result card yet" if run.card is None else "none was made"
                missing.append(f"{run.name}: no evaluation on official states, {why}.")
            else:
                found.append(evaluation)
    for i, (name, card) in enumerate(cards):
        others = [other for _, other in cards if other is not card]
        found.append(of_card(name, card, others, len(groups) + i))
    return found, missing


def of_run(run: Run, colour: int) -> Evaluation | None:
    """Return the evaluation in a run's card; None if there is none."""
    results = run.results.get("evaluation", {}).get("policy")
    if results is None:
        return None
    note = ""
    if guarded := run.results.get("guard", {}).get("guarded_tasks"):
        note = f"The guard has the VLA play tasks {', '.join(map(str, guarded))}."
    return _evaluation(run.name, run.kind, results, results["paired"], "VLA before", colour, note)


def of_card(name: str, card: EvalCard, others: Sequence[EvalCard], colour: int) -> Evaluation:
    """Return the evaluation of a card of ``vla-gym eval``.

    One that is not paired is compared with the first of the others that is of a VLA on the same
    states.
    """
    policy, results = card.protocol["policy"], card.content["results"]
    paired = results.get("paired")
    is_vla = _is_untrained(policy)
    if paired is None and not is_vla:
        paired = _paired(card, others)
    baseline = None if paired is None else policy_name(paired["policy"])
    shown = None if is_vla and paired is None else colour
    sampled = card.protocol.get("first_seed") is not None
    note = "Of sampled layouts, not of official states." if sampled else ""
    return _evaluation(name, policy_name(policy), results, paired, baseline, shown, note)


def _is_untrained(policy: Mapping[str, Any]) -> bool:
    """Return whether a policy is a VLA as it was before a run."""
    return policy["kind"] == "vla" and not policy.get("run")


def _paired(card: EvalCard, others: Sequence[EvalCard]) -> dict[str, Any] | None:
    for other in others:
        if not _is_untrained(other.protocol["policy"]):
            continue
        try:
            check_comparable(card.protocol, other)
            compared = compare(card.episodes, other.episodes)
        except ConfigError:
            continue  # of other states, or another world
        return {"policy": other.protocol["policy"], **compared}
    return None


def _evaluation(
    name: str,
    policy: str,
    results: Mapping[str, Any],
    paired: Mapping[str, Any] | None,
    baseline: str | None,
    colour: int | None,
    note: str,
) -> Evaluation:
    compared = [None] * len(results["tasks"]) if paired is None else paired["tasks"]
    tasks = [_outcome(row, pair) for row, pair in zip(results["tasks"], compared, strict=True)]
    rates = [task["baseline"][0] / max(1, task["count"]) for task in tasks if task["baseline"]]
    return {
        "name": name,
        "policy": policy,
        "baseline": baseline,
        "colour": colour,
        "tasks": tasks,
        "total": _outcome(results["total"], None if paired is None else paired["total"]),
        "mean_over_tasks": results["total"]["mean_over_tasks"],
        "baseline_mean_over_tasks": sum(rates) / len(rates) if rates else None,
        "note": note,
    }


def _outcome(row: Mapping[str, Any], paired: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return successes and episodes of the policy and of the baseline, and their comparison."""
    count = row["num_episodes"]
    outcome = {key: row.get(key) for key in ("suite", "task_id", "instruction")}
    outcome |= {"won": row["num_successes"], "count": count, "baseline": None}
    if paired is not None:
        # Of the same states: what both or only the other one solved.
        outcome["baseline"] = [paired["both"] + paired["losses"], count]
    return outcome | {key: (paired or {}).get(key) for key in ("wins", "losses", "p_value")}
