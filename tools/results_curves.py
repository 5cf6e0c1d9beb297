"""Draw training success of the runs in results/ by control steps and by minutes, as SVG files.

Part of tools/make_results_page.py.

Reads results/GROUP/NAME/curve.json and train.json, writes docs/results_GROUP.svg. Runs of one kind
(same task, algorithm and settings, other seeds; of long, suite_ablation and groups on LIBERO's own
assets: same name but for its -sSEED) share a colour. On lite PPO and GRPO are drawn with
TD3+BC's runs on the same suite.
Training episodes are played on sampled layouts with exploration noise, so the curves lie under the
greedy results of the tables. draw_tasks shows the official states of each task, draw_pairs those of
pairs of runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vla_gym.suites import get_task
from vla_gym_trainers.report.curves import Band
from vla_gym_trainers.report.plots import STYLE, Line, colour_of, draw_lines, style_of, svg_of

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "results", ROOT / "docs"


def kind_of(group: str, name: str, train: dict[str, Any]) -> str:
    """Return what runs of other seeds have in common: algorithm and task or suite, or the name."""
    if group in ("suite_ablation", "long") or group.startswith("libero"):
        return re.sub(r"-s\d+(?=-|$)", "", name)
    config = train["config"]
    suite, ids = _suite(train), config["task_ids"]
    stride = f", stride {config['stride']}" if config.get("stride") else ""
    if ids is not None and len(ids) == 1:
        extra = f", pessimism {config['pessimism']:g}" if config.get("pessimism") else ""
        return f"{suite} {ids[0]}: {get_task(suite, ids[0]).instruction}{extra}{stride}"
    length = ", baseline by length" if config.get("baseline") == "length" else ""
    return f"{train['kind']}, {suite}{stride}{length}"


def runs_of(group: str) -> list[tuple[Path, str]]:
    """Return folder and kind of the runs of a group's picture."""
    cards = cards_of(group)
    found = [(folder, kind_of(group, folder.name, train)) for folder, train in cards]
    if group == "on_policy":
        suites = {_suite(train) for _, train in cards}
        for folder, train in cards_of("suite"):
            if _suite(train) in suites:
                found.append((folder, kind_of("suite", folder.name, train)))
    return found


def _suite(train: dict[str, Any]) -> str:
    return train["config"]["suite"].removeprefix("libero_")


def cards_of(group: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return folder and training card of each run of a group."""
    files = sorted((RESULTS / group).glob("*/train.json"))
    return [(file.parent, json.loads(file.read_text())) for file in files]


def draw(group: str) -> bytes | None:
    """Return the group's SVG, or None if it has no curves."""
    runs = runs_of(group)
    kinds = list(dict.fromkeys(kind for _, kind in runs))
    if not kinds:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.9 + 0.17 * len(kinds)), layout="constrained")
        for column, name in enumerate(("control steps", "minutes")):
            lines: list[Line] = []
            for folder, kind in runs:
                points = json.loads((folder / "curve.json").read_text())
                *x, success = np.array(points, np.float64).T
                lines.append((kinds.index(kind), Band(x[column], success)))
            title = f"training success by {name}"
            axes = figure.add_subplot(1, 2, column + 1, title=title, xlabel=name)
            draw_lines(axes, lines, percent=True, most_dots=0)
        keys = [
            Line2D([], [], color=colour_of(i), linestyle=style_of(i)) for i in range(len(kinds))
        ]
        figure.legend(keys, kinds, loc="outside lower left", frameon=False)
        return svg_of(figure)


def draw_tasks(panels: dict[str, list[tuple[str, dict[str, Any]]]]) -> bytes:
    """Return an SVG of each task's official states, the VLA's and each run's.

    Args:
        panels: Kind and results of the evaluation of each run, by the panels' titles.
    """
    kinds = list(dict.fromkeys(kind for runs in panels.values() for kind, _ in runs))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.0 + 0.17 * len(kinds)), layout="constrained")
        for place, (title, runs) in enumerate(panels.items()):
            pairs = runs[0][1]["paired"]["tasks"]
            before, y = [pair["both"] + pair["losses"] for pair in pairs], np.arange(len(pairs))
            axes = figure.add_subplot(1, len(panels), place + 1, title=title, xlim=(-1, 51))
            axes.plot(before, y, "|", color=colour_of(None), markersize=9)
            for number, (kind, results) in enumerate(runs):
                won = [task["num_successes"] for task in results["tasks"]]
                at = y + 0.2 * (number - (len(runs) - 1) / 2)
                colour = colour_of(kinds.index(kind))
                axes.hlines(at, before, won, color=colour, alpha=0.4)
                axes.plot(won, at, "o", color=colour, markersize=3.5)
            axes.set_yticks(y, [f"task {task['task_id']}" for task in pairs])
            axes.invert_yaxis()
            axes.set_xlabel("official states of 50 solved")
        keys = [Line2D([], [], color=colour_of(i), marker="o") for i in range(len(kinds))]
        vla = Line2D([], [], color=colour_of(None), marker="|", linestyle="")
        labels = ["VLA alone", *kinds]
        figure.legend([vla, *keys], labels, loc="outside lower left", frameon=False)
        return svg_of(figure)


def draw_pairs(kinds: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]) -> bytes:
    """Return an SVG of the official states that runs solve, and those they are paired with.

    Args:
        kinds: Settings of runs and results of their evaluation, by what stands in the token's
            place.
    """
    found = sorted({_suite({"config": config}) for runs in kinds.values() for config, _ in runs})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 1.0 + 0.55 * len(kinds)), layout="constrained")
        axes = figure.add_subplot(xlabel="official states of 500 solved")
        for y, runs in enumerate(kinds.values()):
            for number, (config, results) in enumerate(runs):
                at = [y + 0.14 * (number - (len(runs) - 1) / 2)] * 2
                pair, won = results["paired"]["total"], results["total"]["num_successes"]
                colour = colour_of(found.index(_suite({"config": config})))
                x = [pair["both"] + pair["losses"], won]
                axes.plot(x, at, color=colour, alpha=0.4)
                axes.plot(x[:1], at[:1], "o", color=colour, markersize=5, markerfacecolor="none")
                axes.plot(x[1:], at[1:], "o", color=colour, markersize=5)
        axes.set_yticks(range(len(kinds)), [kind.replace(", ", ",\n") for kind in kinds])
        axes.invert_yaxis()
        grey: dict[str, Any] = {"color": colour_of(None), "marker": "o", "linestyle": ""}
        keys = [Line2D([], [], color=colour_of(i), label=name) for i, name in enumerate(found)]
        keys.append(Line2D([], [], label="with the token", markerfacecolor="none", **grey))
        keys.append(Line2D([], [], label="with what stands at the left", **grey))
        figure.legend(handles=keys, loc="outside lower left", frameon=False, ncols=len(keys))
        return svg_of(figure)


def write_all(groups: tuple[str, ...]) -> None:
    """Write the pictures of each group that has curves."""
    for group in groups:
        if (picture := draw(group)) is not None:
            (DOCS / f"results_{group}.svg").write_bytes(picture)
