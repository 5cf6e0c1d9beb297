"""Final evaluations on the official states: policies against the VLA, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym_trainers.evaluation.cards import EvalCard, check_comparable
from vla_gym_trainers.evaluation.summary import compare
from vla_gym_trainers.evaluation.tables import policy_name
from vla_gym_trainers.report.data import Group, Run


@dataclass(frozen=True)
class Outcome:
    """One task, or all of them.

    Attributes:
        suite, task_id, instruction: Which task.
        won, count: Successes and episodes of the policy.
        baseline: Successes and episodes of the VLA on the same states, None without a comparison.
        wins, losses: States that only one of the two solved.
        p_value: McNemar's exact test.
    """

    suite: str
    task_id: int | None
    instruction: str
    won: int
    count: int
    baseline: tuple[int, int] | None = None
    wins: int | None = None
    losses: int | None = None
    p_value: float | None = None

    @property
    def rate(self) -> float:
        """Success rate of the policy."""
        return self.won / max(1, self.count)


@dataclass(frozen=True)
class Evaluation:
    """One policy on official states.

    Attributes:
        name: Of the run or card.
        policy, baseline: Who played; baseline None: nothing to compare with.
        colour: Of its group; None for the VLA itself.
        tasks: Task by task.
        total: Over all of their states.
        note: What else must be said, or "".
    """

    name: str
    policy: str
    baseline: str | None
    colour: int | None
    tasks: tuple[Outcome, ...]
    total: Outcome
    note: str = ""

    @property
    def mean(self) -> float:
        """Mean over the tasks of the policy's rates."""
        return sum(task.rate for task in self.tasks) / max(1, len(self.tasks))

    @property
    def baseline_mean(self) -> float | None:
        """Mean over the tasks of the VLA's rates."""
        rates = [t.baseline[0] / max(1, t.baseline[1]) for t in self.tasks if t.baseline]
        return sum(rates) / len(rates) if rates and len(rates) == len(self.tasks) else None


def collect(
    groups: Sequence[Group], cards: Sequence[tuple[str, EvalCard]]
) -> tuple[list[Evaluation], list[str]]:
    """Return every evaluation, and sentences about what is missing.

    Raises:
        ConfigError: If a card is damaged.
    """
    found, missing = [], []
    for group in groups:
        for run in group.runs:
            try:
                evaluation = of_run(run, group.index)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"The card of {run.path} is damaged: {error!r}.") from error
            if evaluation is None:
                why = "it has no result card yet" if run.card is None else "none was made"
                missing.append(f"{run.name}: no evaluation on official states, {why}.")
            else:
                found.append(evaluation)
    for i, (name, card) in enumerate(cards):
        others = [other for _, other in cards if other is not card]
        found.append(of_card(name, card, others, len(groups) + i))
    return found, missing


def plain_evaluations(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return the numbers of evaluations as they go into the page's data."""
    return [
        {**asdict(e), "mean_over_tasks": e.mean, "baseline_mean_over_tasks": e.baseline_mean}
        for e in evaluations
    ]


def of_run(run: Run, colour: int) -> Evaluation | None:
    """Return the evaluation in a run's card; None if there is none."""
    evaluation = run.results.get("evaluation", {})
    if "start" not in evaluation:
        return None
    start, policy = evaluation["start"], evaluation["policy"]
    paired = {**policy["paired"]["total"], "tasks": policy["paired"]["tasks"]}
    tasks = _tasks(policy["tasks"], paired["tasks"], start["tasks"])
    note = ""
    if guarded := run.results.get("guard", {}).get("guarded_tasks"):
        note = f"The guard has the VLA play tasks {', '.join(map(str, guarded))}."
    return Evaluation(run.name, run.kind, "VLA before", colour, tasks, _total(tasks, paired), note)


def of_card(name: str, card: EvalCard, others: Sequence[EvalCard], colour: int) -> Evaluation:
    """Return the evaluation of a card of ``vla-gym eval``.

    Args:
        name: Of the card.
        card: It may be paired with another already.
        others: Else it is compared with the first of these that is of a VLA on the same states.
        colour: Of the policy.
    """
    policy = card.protocol["policy"]
    rows, paired = card.content["results"]["tasks"], card.content["results"].get("paired")
    is_vla = policy["kind"] == "vla"
    if paired is None and not is_vla:
        paired = _paired(card, others)
    shown = None if is_vla and paired is None else colour
    if paired is None:
        tasks = _tasks(rows, None, None)
        return Evaluation(name, policy_name(policy), None, shown, tasks, _total(tasks, None))
    tasks = _tasks(rows, paired["tasks"], None)
    baseline = policy_name(paired["policy"])
    total = _total(tasks, paired["total"])
    return Evaluation(name, policy_name(policy), baseline, shown, tasks, total)


def _paired(card: EvalCard, others: Sequence[EvalCard]) -> dict[str, Any] | None:
    for other in others:
        if other.protocol["policy"]["kind"] != "vla":
            continue
        try:
            check_comparable(card.protocol, other)
            compared = compare(card.episodes, other.episodes)
        except ConfigError:
            continue  # of other states, or another world
        return {"policy": other.protocol["policy"], **compared}
    return None


def _tasks(
    rows: Sequence[Mapping[str, Any]],
    paired: Sequence[Mapping[str, Any]] | None,
    baseline: Sequence[Mapping[str, Any]] | None,
) -> tuple[Outcome, ...]:
    """Join the rows of a policy, of the comparison and of the baseline, which are in one order."""
    outcomes = []
    for i, row in enumerate(rows):
        suite, task_id = row["suite"], int(row["task_id"])
        before = None
        if baseline is not None:
            before = int(baseline[i]["num_successes"]), _count(baseline[i])
        elif paired is not None:
            # Of the same states: what both or only the other one solved.
            before = paired[i]["both"] + paired[i]["losses"], _count(row)
        outcomes.append(
            Outcome(
                suite,
                task_id,
                row.get("instruction") or _instruction(suite, task_id),
                int(row["num_successes"]),
                _count(row),
                before,
                **_compared(None if paired is None else paired[i]),
            )
        )
    return tuple(outcomes)


def _total(tasks: Sequence[Outcome], paired: Mapping[str, Any] | None) -> Outcome:
    before = [task.baseline for task in tasks if task.baseline is not None]
    baseline = (sum(b[0] for b in before), sum(b[1] for b in before)) if before else None
    won, count = sum(task.won for task in tasks), sum(task.count for task in tasks)
    return Outcome("", None, "all states", won, count, baseline, **_compared(paired))


def _compared(paired: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if paired is None else {key: paired[key] for key in ("wins", "losses", "p_value")}


def _count(row: Mapping[str, Any]) -> int:
    return int(row["num_states"] if "num_states" in row else row["num_episodes"])


def _instruction(suite: str, task_id: int) -> str:
    from vla_gym.suites import get_task

    try:
        return get_task(suite, task_id).instruction
    except UnknownTaskError:
        return ""
