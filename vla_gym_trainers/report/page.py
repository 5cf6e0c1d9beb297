"""The page: data of its sections, filled into ``template.html``; no address outside it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

import vla_gym
from vla_gym_trainers.evaluation.cards import EvalCard
from vla_gym_trainers.report import learning
from vla_gym_trainers.report.data import (
    Group,
    Run,
    compact,
    differences,
    group_runs,
    read_sources,
    text_of,
)
from vla_gym_trainers.report.evaluations import Evaluation, collect
from vla_gym_trainers.report.films import strips_of
from vla_gym_trainers.report.plots import bar_plot, colour_of

Cards = Sequence[tuple[str, EvalCard]]


def make_page(paths: Sequence[Path], *, title: str = "vla_gym report", films: int = 4) -> str:
    """Return the page of a report; see :class:`.command.ReportConfig` for the arguments.

    Raises:
        ConfigError: If a run or card is missing, damaged or something else.
    """
    runs, cards = read_sources(paths)
    groups = group_runs(runs)
    evaluations, no_evaluation = collect(groups, cards)
    strips, no_films = strips_of(runs, cards, films)
    sections: dict[str, Any] = {
        "final": {
            "evaluations": evaluations,
            "plots": [_bars(evaluation) for evaluation in evaluations],
            "seeds": _means_of_seeds(groups, evaluations),
            "missing": no_evaluation,
        },
        "films": {"strips": strips, "missing": no_films},
        "versions": _versions(runs, cards),
    }
    numbers: dict[str, Any] = {}
    if runs:
        sections["success"] = learning.success_of(groups)
        numbers = sections["success"]["numbers"]
        sections["losses"] = learning.losses_of(groups)
        sections["throughput"] = learning.throughput_of(groups)
        sections["staleness"] = learning.staleness_of(groups)
    data = {
        "groups": [
            {"label": g.label, "runs": [run.name for run in g.runs], "success": numbers[g.label]}
            for g in groups
        ],
        "evaluations": evaluations,
        "differences": differences(runs),
    }
    return _template().render(
        title=title,
        runs=runs,
        entries=[(group.label, group.index) for group in groups],
        sources=_sources(groups, cards),
        data=data,
        version=vla_gym.__version__,
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **sections,
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vla_gym_trainers.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"colour": colour_of, "compact": compact, "text": text_of}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template("template.html")


def _sources(groups: Sequence[Group], cards: Cards) -> list[tuple[Any, ...]]:
    """Return colour, name, kind, tasks, seed and state of every run and card."""
    rows: list[tuple[Any, ...]] = []
    for group in groups:
        for run in group.runs:
            tasks = run.config.get("task_ids")
            what = "all" if tasks is None else _ranges(tasks)
            tasks = f"{run.config.get('suite', '?')}: {what}"
            state = "finished" if run.card is not None else "no result card yet"
            if run.rows:
                last = max(row["step"] for row in run.rows)
                state += f", {compact(last)} {run.unit} logged"
            rows.append((group.index, run.name, run.kind, tasks, run.config.get("seed"), state))
    for name, card in cards:
        protocol = card.protocol
        tasks = "; ".join(f"{suite}: {_ranges(ids)}" for suite, ids in protocol["tasks"].items())
        done = f"evaluation, {protocol['episodes']} states a task"
        rows.append(("", name, "eval", tasks, protocol["policy"].get("seed"), done))
    return rows


def _ranges(tasks: Iterable[int]) -> str:
    """Return numbers in few words: 0-4, 7."""
    runs: list[list[int]] = []
    for task in sorted(set(tasks)):
        if runs and task == runs[-1][-1] + 1:
            runs[-1].append(task)
        else:
            runs.append([task])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def _means_of_seeds(groups: Sequence[Group], evaluations: Sequence[Evaluation]) -> list[str]:
    sentences = []
    for group in groups:
        rates = [100 * e["mean_over_tasks"] for e in evaluations if e["colour"] == group.index]
        if len(rates) > 1:
            low, mean, high = min(rates), sum(rates) / len(rates), max(rates)
            sentences.append(
                f"{group.label}: mean over tasks and {len(rates)} seeds {mean:.1f} % "
                f"({low:.1f} .. {high:.1f})."
            )
    return sentences


def _bars(evaluation: Evaluation) -> str:
    rows = []
    for task in evaluation["tasks"]:
        bars = [(evaluation["colour"], task["won"], task["count"])]
        if task["baseline"] is not None:
            bars.insert(0, (None, *task["baseline"]))
        rows.append((f"{task['suite']} {task['task_id']}", bars))
    return bar_plot(rows)


def _versions(runs: Sequence[Run], cards: Cards) -> dict[str, Any]:
    """Return ``names`` and ``rows``: versions, machine, renderer, seeds; and what has no card."""
    missing = []
    if lacking := [run.name for run in runs if run.card is None]:
        names = ", ".join(lacking)
        missing.append(f"Versions stand in the result card, which {names} lacks.")
    named: list[tuple[str, Mapping[str, Any]]] = [(r.name, r.card) for r in runs if r.card]
    named += [(name, card.content) for name, card in cards]
    columns = [_facts(card) for _, card in named]
    rows = {
        key: [text_of(column.get(key)) for column in columns]
        for key in dict.fromkeys(key for column in columns for key in column)
    }
    return {"names": [name for name, _ in named], "rows": rows, "missing": missing}


def _facts(card: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"seed ({name})": seed for name, seed in card.get("seeds", {}).items()}
    facts |= dict(card["environment"])
    facts |= {f"version of {name}": version for name, version in card["versions"].items()}
    return facts | {"created": card.get("created")}
