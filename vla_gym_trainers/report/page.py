"""The page: its sections in order, filled into ``template.html``; no address outside it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

import vla_gym
from vla_gym_trainers.evaluation.cards import EvalCard
from vla_gym_trainers.report import learning
from vla_gym_trainers.report.data import Group, Run, differences, group_runs, read_sources, text_of
from vla_gym_trainers.report.evaluations import Evaluation, Outcome, collect, plain_evaluations
from vla_gym_trainers.report.films import strips_of
from vla_gym_trainers.report.plots import bar_plot, colour_of
from vla_gym_trainers.report.section import Cell, Legend, Pictures, Section, Table, Text, compact

Cards = Sequence[tuple[str, EvalCard]]


def make_page(paths: Sequence[Path], *, title: str = "vla_gym report", films: int = 4) -> str:
    """Return the page of a report.

    Args:
        paths: Run directories and result cards.
        title: Heading of the page.
        films: Film strips of each run or card at most.

    Raises:
        ConfigError: If a run or card is missing, damaged or something else.
    """
    runs, cards = read_sources(paths)
    groups = group_runs(runs)
    evaluations, no_evaluation = collect(groups, cards)
    curves, numbers = learning.success_section(groups)
    final = Section("Success on the official states", missing=no_evaluation)
    final.parts += _evaluations(groups, evaluations)
    strips, no_films = strips_of(runs, cards, films)
    film_section = Section("Films", missing=no_films)
    for strip in strips:
        film_section.parts.append(Text(strip.title, "heading"))
        film_section.parts.append(Pictures(strip.pictures, "wide", captions=True))
    sections = [Section("Runs", [_runs_table(groups, cards)])]
    if runs:
        sections.append(curves)
    sections += [final, film_section]
    if runs:
        sections.append(learning.losses_section(groups))
        sections.append(learning.throughput_section(groups))
        sections.append(learning.staleness_section(groups))
        sections.append(_settings_section(runs))
    sections.append(_versions_section(runs, cards))
    data = {
        "groups": [
            {"label": g.label, "runs": [run.name for run in g.runs], "success": numbers[g.label]}
            for g in groups
        ],
        "evaluations": plain_evaluations(evaluations),
        "differences": differences(runs),
    }
    return _template().render(
        title=title,
        sections=[section for section in sections if section.parts or section.missing],
        data=data,
        version=vla_gym.__version__,
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vla_gym_trainers.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["colour"] = colour_of
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template("template.html")


def _runs_table(groups: Sequence[Group], cards: Cards) -> Table:
    rows: list[tuple[Any, ...]] = []
    for group in groups:
        for run in group.runs:
            tasks = run.config.get("task_ids")
            what = "all" if tasks is None else _ranges(tasks)
            state = "finished" if run.card is not None else "no result card yet"
            if run.rows:
                last = max(row["step"] for row in run.rows)
                state += f", {compact(last)} {run.unit} logged"
            cell, tasks_of = Cell(run.name, group.index), f"{run.config.get('suite', '?')}: {what}"
            rows.append((cell, run.kind, tasks_of, text_of(run.config.get("seed")), state))
    for name, card in cards:
        protocol = card.protocol
        tasks = "; ".join(f"{suite}: {_ranges(ids)}" for suite, ids in protocol["tasks"].items())
        done = f"evaluation, {protocol['episodes']} states a task"
        rows.append((name, "eval", tasks, text_of(protocol["policy"].get("seed")), done))
    return Table(("run", "kind", "suite: tasks", "seed", "state"), rows)


def _ranges(tasks: Iterable[int]) -> str:
    """Return numbers in few words: 0-4, 7."""
    runs: list[list[int]] = []
    for task in sorted(set(tasks)):
        if runs and task == runs[-1][-1] + 1:
            runs[-1].append(task)
        else:
            runs.append([task])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def _evaluations(groups: Sequence[Group], evaluations: Sequence[Evaluation]) -> list[Any]:
    """Return a summary, the means of seeds, then bars and numbers of each evaluation."""
    if not evaluations:
        return []
    summary = []
    for evaluation in evaluations:
        total, base = evaluation.total, evaluation.baseline_mean
        means = (f"{100 * evaluation.mean:.1f} %", "-" if base is None else f"{100 * base:.1f} %")
        won = f"{total.won}/{total.count}"
        summary.append((evaluation.name, evaluation.policy, *means, won, *_compared(total)))
    head = ("run", "policy", "mean over tasks", "VLA", "states won", "only it", "only VLA", "p")
    parts: list[Any] = [Table(head, summary)]
    for group in groups:
        rates = [100 * e.mean for e in evaluations if e.colour == group.index]
        if len(rates) > 1:
            low, mean, high = min(rates), sum(rates) / len(rates), max(rates)
            text = f"{mean:.1f} % ({low:.1f} .. {high:.1f})"
            seeds = f"{group.label}: mean over tasks and {len(rates)} seeds {text}."
            parts.append(Text(seeds))
    for evaluation in evaluations:
        parts += _tasks_of(evaluation)
    return parts


def _tasks_of(evaluation: Evaluation) -> list[Any]:
    bars, rows = [], []
    for task in evaluation.tasks:
        row_bars = [(evaluation.colour, task.won, task.count)]
        before = "-"
        if task.baseline is not None:
            row_bars.insert(0, (None, *task.baseline))
            before = f"{task.baseline[0]}/{task.baseline[1]}"
        name = f"{task.suite} {task.task_id}"
        bars.append((name, row_bars))
        won = f"{task.won}/{task.count}"
        rows.append((name, task.instruction, before, won, *_compared(task)))
    entries: list[tuple[str, int | None]] = [(evaluation.policy, evaluation.colour)]
    says = "Bars: success on the official states with Wilson's 95 % intervals"
    if evaluation.baseline is not None:
        entries.insert(0, (evaluation.baseline, None))
        says += "; p: McNemar's exact test on the same states, two-sided"
    head = ("task", "instruction", evaluation.baseline or "VLA", "policy", "only it", "only VLA")
    return [
        Text(evaluation.name, "heading"),
        Legend(entries),
        Pictures([(evaluation.name, bar_plot(bars))]),
        Table((*head, "p"), rows),
        Text(f"{says}. {evaluation.note}"),
    ]


def _compared(outcome: Outcome) -> tuple[str, str, str]:
    if outcome.wins is None or outcome.p_value is None:
        return "-", "-", "-"
    return str(outcome.wins), str(outcome.losses), f"{outcome.p_value:.2g}"


def _settings_section(runs: Sequence[Run]) -> Section:
    """Return settings in which the runs differ, and all settings folded away."""
    section = Section("Settings")
    found = differences(runs)
    if found:
        rows = [(key, *map(text_of, values)) for key, values in found.items()]
        section.parts.append(Table(("setting", *(run.name for run in runs)), rows))
    elif len(runs) > 1:
        section.missing.append("The runs have the same settings, as far as both have them.")
    for run in runs:
        rows = [(key, text_of(value)) for key, value in run.config.items()]
        section.parts.append(Table(("setting", "value"), rows, f"All settings of {run.name}"))
    return section


def _versions_section(runs: Sequence[Run], cards: Cards) -> Section:
    """Return versions, machine, GL renderer, asset pack and seeds; and what has no card."""
    section = Section("Versions, machine, seeds")
    if missing := [run.name for run in runs if run.card is None]:
        lacking = ", ".join(missing)
        section.missing.append(f"Versions stand in the result card, which {lacking} lacks.")
    named: list[tuple[str, Mapping[str, Any]]] = [(r.name, r.card) for r in runs if r.card]
    named += [(name, card.content) for name, card in cards]
    columns = [_facts(card) for _, card in named]
    rows: list[tuple[Any, ...]] = []
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [text_of(column.get(key)) for column in columns]
        differs = len(set(values)) > 1 and not key.startswith("seed")
        rows.append((key, *(Cell(value, differs=differs) for value in values)))
    if rows:
        section.parts.append(Table(("", *(name for name, _ in named)), rows))
    return section


def _facts(card: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"seed ({name})": seed for name, seed in card.get("seeds", {}).items()}
    facts |= dict(card["environment"])
    facts |= {f"version of {name}": version for name, version in card["versions"].items()}
    return facts | {"created": card.get("created")}
