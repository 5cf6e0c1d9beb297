"""The page's tables: which runs, their final evaluations, differing settings, versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vla_gym_trainers.evaluation.cards import EvalCard
from vla_gym_trainers.report.charts import colour_class, compact, legend, rate_bars
from vla_gym_trainers.report.evaluations import Evaluation, Outcome
from vla_gym_trainers.report.films import Strip
from vla_gym_trainers.report.groups import Group, differences
from vla_gym_trainers.report.markup import Markup, join, table, tag
from vla_gym_trainers.report.sources import Run


def runs_section(groups: Sequence[Group], cards: Sequence[tuple[str, EvalCard]]) -> Markup:
    """Return the table of what the page is about."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        for run in group.runs:
            tasks = run.config.get("task_ids")
            what = "all" if tasks is None else _numbers(tasks)
            last = max((row["step"] for row in run.rows), default=None)
            unit = "chunks" if run.counts_chunks else "control steps"
            state = "finished" if run.card is not None else "no result card yet"
            if last is not None:
                state += f", {compact(last)} {unit} logged"
            key = tag("i", class_=f"key {colour_class(group.index)}")
            marked = join([key, run.name])
            tasks_of = f"{run.config.get('suite', '?')}: {what}"
            rows.append((marked, run.kind, tasks_of, _text(run.seed), state))
    for name, card in cards:
        protocol = card.protocol
        tasks = "; ".join(f"{s}: {_numbers(t)}" for s, t in protocol["tasks"].items())
        done = f"evaluation, {protocol['episodes']} states a task"
        rows.append((name, "eval", tasks, _text(protocol["policy"].get("seed")), done))
    return table(("run", "kind", "suite: tasks", "seed", "state"), rows)


def _numbers(tasks: Iterable[int]) -> str:
    """Return numbers in few words: 0-4, 7."""
    runs: list[list[int]] = []
    for task in sorted(set(tasks)):
        if runs and task == runs[-1][-1] + 1:
            runs[-1].append(task)
        else:
            runs.append([task])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def evaluations_section(groups: Sequence[Group], evaluations: Sequence[Evaluation]) -> Markup:
    """Return a summary, the means of seeds, then bars for each task of each evaluation."""
    if not evaluations:
        return Markup("")
    head = ("run", "policy", "mean over tasks", "VLA", "states won", "only it", "only VLA", "p")
    summary = []
    for evaluation in evaluations:
        total, base = evaluation.total, evaluation.baseline_mean
        cells = [evaluation.name, evaluation.policy, f"{100 * evaluation.mean:.1f} %"]
        cells += ["-" if base is None else f"{100 * base:.1f} %", f"{total.won}/{total.count}"]
        summary.append((*cells, *_compared(total)))
    parts = [table(head, summary)]
    for group in groups:
        means = [100 * e.mean for e in evaluations if e.colour == group.index]
        if len(means) > 1:
            low, mean, high = min(means), sum(means) / len(means), max(means)
            text = f"{mean:.1f} % ({low:.1f} .. {high:.1f})"
            seeds = f"{group.label}: mean over tasks and {len(means)} seeds {text}."
            parts.append(tag("p", tag("i", class_=f"key {colour_class(group.index)}"), seeds))
    parts += [_bars(evaluation) for evaluation in evaluations]
    return join(parts)


def _bars(evaluation: Evaluation) -> Markup:
    colour = evaluation.colour
    head = ("task", _scale(), "VLA", "policy", "only it / VLA", "p")
    if evaluation.baseline is None:
        head = ("task", _scale(), "", "success", "", "")
    rows = []
    for task in evaluation.tasks:
        bars = [(evaluation.policy, colour, task.won, task.count)]
        before = ""
        if task.baseline is not None:
            bars.insert(0, (evaluation.baseline or "VLA", None, *task.baseline))
            before = f"{task.baseline[0]}/{task.baseline[1]}"
        wins, losses, p_value = _compared(task)
        name = join([tag("b", f"{task.suite} {task.task_id}"), " ", task.instruction])
        pair = f"{wins} / {losses}" if task.wins is not None else ""
        cells = (name, rate_bars(bars), before, f"{task.won}/{task.count}", pair)
        rows.append((*cells, p_value if task.wins is not None else ""))
    entries: list[tuple[str, int | None]] = [(evaluation.policy, colour)]
    if evaluation.baseline is not None:
        entries.insert(0, (evaluation.baseline, None))
    says = "Bars: success on the official states with Wilson's 95 % intervals"
    if evaluation.baseline is not None:
        says += "; p: McNemar's exact test on the same states, two-sided"
    note = tag("p", f"{says}. {evaluation.note}", class_="note")
    return join([tag("h3", evaluation.name), legend(entries), table(head, rows, "tasks"), note])


def _scale() -> Markup:
    return tag("div", *(tag("span", text) for text in ("0", "50", "100 %")), class_="scale")


def _compared(outcome: Outcome) -> tuple[str, str, str]:
    if outcome.wins is None or outcome.p_value is None:
        return "-", "-", "-"
    return str(outcome.wins), str(outcome.losses), f"{outcome.p_value:.2g}"


def plain_evaluations(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return the numbers of evaluations as they go into the page's data."""
    return [
        {**asdict(e), "mean_over_tasks": e.mean, "baseline_mean_over_tasks": e.baseline_mean}
        for e in evaluations
    ]


def films_section(strips: Sequence[Strip]) -> Markup:
    """Return the film strips."""
    parts = []
    for strip in strips:
        pictures = [
            tag(
                "figure", tag("figcaption", name), tag("img", src=address, alt=name, loading="lazy")
            )
            for name, address in strip.pictures
        ]
        parts.append(tag("h3", strip.title))
        parts += [tag("div", picture, class_="scroll strip") for picture in pictures]
    return join(parts)


def differences_section(runs: Sequence[Run]) -> tuple[Markup, list[str]]:
    """Return settings in which the runs differ, and all settings folded away."""
    parts: list[Markup] = []
    missing = []
    found = differences(runs)
    if found:
        rows = [(tag("code", key), *map(_text, values)) for key, values in found.items()]
        parts.append(table(("setting", *(run.name for run in runs)), rows))
    elif len(runs) > 1:
        missing.append("The runs have the same settings, as far as both have them.")
    for run in runs:
        rows = [(tag("code", key), _text(value)) for key, value in run.config.items()]
        summary = tag("summary", f"All settings of {run.name}")
        parts.append(tag("details", summary, table(("setting", "value"), rows)))
    return join(parts), missing


def versions_section(
    runs: Sequence[Run], cards: Sequence[tuple[str, EvalCard]]
) -> tuple[Markup, list[str]]:
    """Return versions, machine, GL renderer, asset pack and seeds; and what has no card."""
    named: list[tuple[str, Mapping[str, Any]]] = [
        (run.name, run.card) for run in runs if run.card is not None
    ]
    named += [(name, card.content) for name, card in cards]
    missing = [run.name for run in runs if run.card is None]
    says = []
    if missing:
        says.append(f"Versions stand in the result card, which {', '.join(missing)} lacks.")
    if not named:
        return Markup(""), says
    columns = [_facts(card) for _, card in named]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in keys:
        values = [_text(column.get(key)) for column in columns]
        mark = "differs" if len(set(values)) > 1 and not key.startswith("seed") else None
        cells = [tag("span", value, class_=mark) if mark else value for value in values]
        rows.append((tag("code", key), *cells))
    return table(("", *(name for name, _ in named)), rows), says


def _facts(card: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"seed ({name})": seed for name, seed in card.get("seeds", {}).items()}
    facts |= dict(card["environment"])
    facts |= {f"version of {name}": version for name, version in card["versions"].items()}
    return facts | {"created": card.get("created")}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def left_out(sentences: Iterable[str]) -> Markup:
    """Return what a section lacks, in one paragraph a sentence."""
    return join([tag("p", sentence, class_="missing") for sentence in sentences])
