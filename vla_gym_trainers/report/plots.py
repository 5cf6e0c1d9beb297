"""Plots of the report, each an SVG picture as a ``data:`` address: lines with bands, bars."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from vla_gym_trainers.evaluation.statistics import wilson_interval
from vla_gym_trainers.report.curves import Band

#: Colours of groups; with more of them they come again, dashed.
COLOURS = (
    "#2a78d6",
    "#eb6834",
    "#1baf7a",
    "#eda100",
    "#e87ba4",
    "#008300",
    "#4a3aa7",
    "#e34948",
)
#: What is compared with: the frozen VLA.
NEUTRAL = "#8f8e87"
#: Text stays text (small files, searchable), and "$" in a name is a dollar, not mathematics.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vla_gym",
    "text.parse_math": False,
    "font.size": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e1e0d9",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#c3c2b7",
    "text.color": "#52514e",
    "axes.labelcolor": "#52514e",
    "xtick.color": "#52514e",
    "ytick.color": "#52514e",
}
# With more points than this, dots would hide the line.
_MOST_DOTS = 60


#: Number of a colour, None for the neutral one (dashed), and what is drawn in it.
Line = tuple[int | None, Band]


def colour_of(index: int | None) -> str:
    """Return a colour as ``#rrggbb``."""
    return NEUTRAL if index is None else COLOURS[index % len(COLOURS)]


def style_of(index: int | None) -> str:
    """Return the style of a line: dashed where a colour comes again."""
    return "--" if index is None or index >= len(COLOURS) else "-"


def line_plot(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    *,
    percent: bool = False,
    unit: float = 1.0,
    size: tuple[float, float] = (3.6, 2.0),
) -> str:
    """Draw one or more lines, rates if ``percent``; return a ``data:`` address.

    ``unit`` is what 1 is on the x axis; the size is in inches.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot(title=title, xlabel=x_label)
        draw_lines(axes, lines, percent=percent, unit=unit)
        return address_of(figure)


def draw_lines(
    axes: Axes,
    lines: Sequence[Line],
    *,
    percent: bool,
    unit: float = 1.0,
    most_dots: int = _MOST_DOTS,
) -> None:
    """Draw lines into axes that are there already, single points marked where there are few."""
    for number, band in lines:
        colour, x = colour_of(number), band.x / unit
        if band.low is not None and band.high is not None:
            if len(x) > 1:
                axes.fill_between(x, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
            else:
                axes.vlines(x, band.low, band.high, color=colour, alpha=0.4)
        for single, y in band.single:
            axes.plot(single / unit, y, color=colour, alpha=0.4, linewidth=0.7)
        marker = "o" if number is not None and len(x) <= most_dots else ""
        axes.plot(
            x,
            band.mean,
            style_of(number),
            color=colour,
            linewidth=1.4,
            marker=marker,
            markersize=2.5,
        )
    axes.set_xlim(left=min(0.0, *(float(band.x.min()) / unit for _, band in lines)))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if percent:
        axes.set_ylim(0.0, 1.0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def bar_plot(rows: Sequence[tuple[str, Sequence[tuple[int | None, int, int]]]]) -> str:
    """Draw success rates with Wilson's 95 % intervals, from 0 to 100 %.

    A row is its label, then colour, successes and episodes of each bar, top first.
    """
    height = 0.6 + sum(0.12 + 0.16 * len(bars) for _, bars in rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.5, height), layout="constrained")
        axes = figure.add_subplot()
        for i, (_, bars) in enumerate(rows):
            for j, (colour, won, count) in enumerate(bars):
                rate = won / max(1, count)
                low, high = wilson_interval(won, count)
                y = i + 0.35 * (j - (len(bars) - 1) / 2)
                spread = np.array([[rate - low], [high - rate]]).clip(0.0)
                whisker = {"elinewidth": 0.8, "capsize": 2}
                axes.barh([y], [rate], 0.32, color=colour_of(colour), xerr=spread, error_kw=whisker)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0.0, 1.0)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(visible=False, axis="y")
        return address_of(figure)


def address_of(figure: Figure) -> str:
    """Return a figure as a ``data:`` address."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg_of(figure)).decode()


def svg_of(figure: Figure) -> bytes:
    """Return a figure as SVG, the same for the same figure."""
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()
