"""Draw training success of the runs in results/ by control steps and by minutes, as SVG files.

Usage: python tools/results_curves.py   (tools/make_results_page.py calls it)

Reads results/GROUP/NAME/curve.json and train.json, writes docs/results_GROUP.svg. Runs of one kind
(same task, algorithm and pessimism, other seeds; of ablations: same name but for its -sSEED) share
a colour. PPO and GRPO are drawn with TD3+BC's runs on the same suite. Training episodes are played
on sampled layouts with exploration noise, so the curves lie under the greedy results of the tables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.suites import get_task
from vla_gym_trainers.report.charts import Line, colour_class, line_chart
from vla_gym_trainers.report.markup import Markup, tag

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
WIDTH, HEIGHT, ROW = 420, 250, 18
# The light colours of the report's page; pictures in documents do not follow a dark page.
STYLE = """
svg { --c: #52514e; background: #ffffff }
text { fill: #52514e; font: 11px system-ui, -apple-system, "Segoe UI", sans-serif }
.grid { stroke: #e1e0d9 } .axis { stroke: #c3c2b7 }
.s0 { --c: #2a78d6 } .s1 { --c: #eb6834 } .s2 { --c: #1baf7a } .s3 { --c: #eda100 }
.s4 { --c: #e87ba4 } .s5 { --c: #008300 } .s6 { --c: #4a3aa7 } .s7 { --c: #e34948 }
.line { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-linejoin: round }
.dashed .line { stroke-dasharray: 5 4 } rect { fill: var(--c) } circle { display: none }
"""


def kind_of(group: str, name: str, train: dict[str, Any]) -> str:
    """Return what runs of other seeds have in common: algorithm and task or suite, or the name."""
    if group == "suite_ablation":
        return re.sub(r"-s\d+$", "", name)
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
    cards = _cards(group)
    found = [(folder, kind_of(group, folder.name, train)) for folder, train in cards]
    if group == "on_policy":
        suites = {_suite(train) for _, train in cards}
        for folder, train in _cards("suite"):
            if _suite(train) in suites:
                found.append((folder, kind_of("suite", folder.name, train)))
    return found


def _suite(train: dict[str, Any]) -> str:
    suite: str = train["config"]["suite"]
    return suite.removeprefix("libero_")


def _cards(group: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return folder and training card of the runs that have a curve."""
    folders = sorted(path.parent for path in (RESULTS / group).glob("*/curve.json"))
    return [(folder, json.loads((folder / "train.json").read_text())) for folder in folders]


def draw(group: str) -> str | None:
    """Return the group's SVG, or None if it has no curves."""
    lines: dict[str, list[Line]] = {"control steps": [], "minutes": []}
    runs = runs_of(group)
    kinds = list(dict.fromkeys(kind for _, kind in runs))
    for folder, kind in runs:
        points = json.loads((folder / "curve.json").read_text())
        steps, minutes, success = np.array(points, np.float64).T
        for key, x in (("control steps", steps), ("minutes", minutes)):
            lines[key].append(Line(folder.name, kinds.index(kind), x, success))
    if not kinds:
        return None
    charts = [
        _placed(line_chart(f"training success by {key}", both, key, percent=True), i * WIDTH)
        for i, (key, both) in enumerate(lines.items())
    ]
    legend = []
    for i, kind in enumerate(kinds):
        x, y = 46, HEIGHT + 14 + i * ROW
        legend.append(tag("rect", x=x, y=y - 9, width=10, height=10, class_=colour_class(i)))
        dashes = " (dashed)" if "dashed" in colour_class(i) else ""
        legend.append(tag("text", f"{kind}{dashes}", x=x + 16, y=y))
    height = HEIGHT + 12 + len(kinds) * ROW
    svg = tag(
        "svg",
        tag("style", Markup(STYLE)),
        *charts,
        *legend,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {2 * WIDTH} {height}",
    )
    return svg + "\n"


def _placed(figure: Markup, x: int) -> Markup:
    """Return a chart's svg element at a place of the picture."""
    found = re.search(r"<svg(.*)</svg>", figure, re.DOTALL)
    assert found is not None
    return Markup(f'<svg x="{x}" width="{WIDTH}" height="{HEIGHT}"{found[1]}</svg>')


def write_all(groups: tuple[str, ...]) -> None:
    """Write the picture of each group that has curves."""
    for group in groups:
        picture = draw(group)
        if picture is not None:
            (DOCS / f"results_{group}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    write_all(("single", "suite", "suite_ablation", "on_policy"))
