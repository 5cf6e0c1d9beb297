"""The page itself: its sections in order, its style, no address outside it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import vla_gym
from vla_gym_trainers.report import details, facts
from vla_gym_trainers.report.config import ReportConfig
from vla_gym_trainers.report.evaluations import collect
from vla_gym_trainers.report.films import strips_of
from vla_gym_trainers.report.groups import Group, differences, group_runs
from vla_gym_trainers.report.markup import Markup, data_block, join, tag
from vla_gym_trainers.report.sources import read_sources
from vla_gym_trainers.report.success import success_section

# Nothing may be loaded from anywhere, and no script runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def make_page(config: ReportConfig) -> str:
    """Return the page of a report.

    Args:
        config: Checked options.

    Raises:
        ConfigError: If a run or card is missing, damaged or something else.
    """
    runs, cards = read_sources(config.runs)
    groups = group_runs(runs)
    evaluations, no_evaluation = collect(groups, cards)
    strips, no_films = strips_of(runs, cards, config.films)
    curves, numbers, no_curves = success_section(groups)
    sections = [_section("Runs", facts.runs_section(groups, cards), ())]
    if runs:
        sections.append(_section("Success while training", curves, no_curves))
    final = facts.evaluations_section(groups, evaluations)
    sections.append(_section("Success on the official states", final, no_evaluation))
    sections.append(_section("Films", facts.films_section(strips), no_films))
    if runs:
        sections.append(_section("Losses", *details.losses_section(groups)))
        sections.append(_section("Throughput", *details.throughput_section(groups)))
        sections.append(_section("Staleness", *details.staleness_section(groups)))
        sections.append(_section("Settings", *facts.differences_section(runs)))
    sections.append(_section("Versions, machine, seeds", *facts.versions_section(runs, cards)))
    data = data_block(
        "report-data",
        {
            "groups": [_plain(group) | {"success": numbers[group.label]} for group in groups],
            "evaluations": facts.plain_evaluations(evaluations),
            "differences": differences(runs),
        },
    )
    return _document(config.title, [*sections, data])


def _plain(group: Group) -> dict[str, object]:
    return {"label": group.label, "runs": [run.name for run in group.runs]}


def _section(title: str, content: Markup, missing: Sequence[str]) -> Markup | None:
    """Return a section; None if there is nothing in it and nothing to say about that."""
    if not content and not missing:
        return None
    return tag("section", tag("h2", title), content, facts.left_out(missing))


def _document(title: str, parts: Sequence[Markup | None]) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("style", Markup(_STYLE)),
    ]
    footer = tag("footer", f"Made by vla-gym report {vla_gym.__version__}, {now}.")
    body = tag("body", tag("main", tag("h1", title), *parts, footer))
    return join([Markup("<!doctype html>"), tag("html", tag("head", *head), body, lang="en")])
