"""Charts as inline SVG: lines with bands, bars with intervals; colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_gym_trainers.evaluation.statistics import wilson_interval
from vla_gym_trainers.report.markup import Markup, join, tag

#: Colours in the page's CSS, ``s0`` .. ``s7``; more groups repeat them with dashes.
NUM_COLOURS = 8
# A chart is drawn for a phone's width and scaled up: its text stays readable there.
_SIZE, _SMALL = (420.0, 250.0), (310.0, 160.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 18.0, 10.0, 38.0
# With more points than this, dots would hide the line.
_MOST_DOTS = 60


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: In the legend.
        colour: Number of the colour; None is the neutral one of what is compared with, dashed.
        x, y: (n,).
        low, high: (n,) of the band, None for none.
        thin: Lines of single runs under it.
    """

    name: str
    colour: int | None
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    thin: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


@dataclass(frozen=True)
class _Frame:
    """Maps numbers to the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float
    height: float

    def place_x(self, value: float) -> float:
        low, high = self.x
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def place_y(self, value: float) -> float:
        low, high = self.y
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def points(self, x: np.ndarray, y: np.ndarray) -> list[str]:
        pairs = zip(x.tolist(), y.tolist(), strict=True)
        return [f"{self.place_x(a):.1f},{self.place_y(b):.1f}" for a, b in pairs]


def line_chart(
    title: str, lines: Sequence[Line], x_label: str, *, percent: bool = False, small: bool = False
) -> Markup:
    """Draw lines.

    Args:
        title: Above the chart.
        lines: At least one with a point.
        x_label: Under the axis.
        percent: The values are rates: the axis goes from 0 to 100 %.
        small: Less high, for many charts.
    """
    count = 4 if small else 5
    last = max(float(line.x.max()) for line in lines)
    x_axis = nice_ticks(0.0, last or 1.0, count)
    if percent:
        y_axis = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    else:
        many = [[line.y, line.low, line.high, *(y for _, y in line.thin)] for line in lines]
        y_axis = nice_ticks(*_range([y for ys in many for y in ys if y is not None]), count=4)
    size = _SMALL if small else _SIZE
    frame = _Frame((x_axis[0], x_axis[-1]), (y_axis[0], y_axis[-1]), *size)
    svg = tag(
        "svg",
        _axes(frame, x_axis, y_axis, x_label, percent),
        *(_drawn(frame, line, percent) for line in lines),
        viewBox=f"0 0 {frame.width:.0f} {frame.height:.0f}",
        role="img",
        aria_label=title,
    )
    return tag("figure", tag("figcaption", title), svg)


def legend(entries: Sequence[tuple[str, int | None]]) -> Markup:
    """Return the names of lines beside their colours."""
    items = [
        tag("span", tag("i", class_=f"key {colour_class(colour)}"), name, class_="entry")
        for name, colour in entries
    ]
    return tag("p", *items, class_="legend")


def colour_class(colour: int | None) -> str:
    """Return the CSS classes of a colour."""
    if colour is None:
        return "base"
    return f"s{colour % NUM_COLOURS}" + (" dashed" if colour >= NUM_COLOURS else "")


def _axes(
    frame: _Frame, x_axis: list[float], y_axis: list[float], x_label: str, percent: bool
) -> Markup:
    parts = []
    bottom, right = frame.height - _BOTTOM, frame.width - _RIGHT
    for value in y_axis:
        y = f"{frame.place_y(value):.1f}"
        text = f"{100 * value:.0f} %" if percent else compact(value)
        parts.append(tag("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", text, x=_LEFT - 6, y=y, dy="0.35em", text_anchor="end"))
    for value in x_axis:
        x = f"{frame.place_x(value):.1f}"
        parts.append(tag("text", compact(value), x=x, y=bottom + 15, text_anchor="middle"))
    middle = (_LEFT + right) / 2
    parts.append(tag("text", x_label, x=middle, y=bottom + 32, text_anchor="middle"))
    parts.append(tag("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    return join(parts)


def _drawn(frame: _Frame, line: Line, percent: bool) -> Markup:
    parts = []
    if line.low is not None and line.high is not None:
        outline = frame.points(line.x, line.high) + frame.points(line.x, line.low)[::-1]
        # Of one point it is a stroke, an area of more.
        kind = ("polygon", "band") if len(line.x) > 1 else ("polyline", "thin")
        parts.append(tag(kind[0], points=" ".join(outline), class_=kind[1]))
    parts += [
        tag("polyline", points=" ".join(frame.points(*single)), class_="thin")
        for single in line.thin
    ]
    places = frame.points(line.x, line.y)
    parts.append(tag("polyline", points=" ".join(places), class_="line"))
    if len(places) <= _MOST_DOTS and line.colour is not None:
        for i, place in enumerate(places):
            x, y = place.split(",")
            parts.append(tag("circle", tag("title", _told(line, i, percent)), cx=x, cy=y, r=2.5))
    return tag("g", *parts, class_=colour_class(line.colour))


def _told(line: Line, i: int, percent: bool) -> str:
    scale, unit = (100.0, " %") if percent else (1.0, "")
    text = f"{line.name}, {compact(line.x[i])}: {scale * line.y[i]:.4g}{unit}"
    if line.low is not None and line.high is not None:
        text += f" ({scale * line.low[i]:.4g} .. {scale * line.high[i]:.4g})"
    return text


def _range(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    values = np.concatenate(arrays)
    return float(values.min()), float(values.max())


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that enclose a range, about ``count`` steps apart."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = 0.5 * abs(low) or 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def compact(value: float) -> str:
    """Return a number in few characters: 12,500 as ``12.5k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.3g}"


def rate_bars(rows: Sequence[tuple[str, int | None, int, int]]) -> Markup:
    """Draw success rates with Wilson's 95 % intervals, as wide as there is room.

    Args:
        rows: Name, colour, successes and episodes of each bar.
    """
    parts: list[Markup] = []
    height = 14 * len(rows)
    for share in (0, 25, 50, 75, 100):
        parts.append(tag("line", x1=f"{share}%", x2=f"{share}%", y1=0, y2=height, class_="grid"))
    for i, (name, colour, won, count) in enumerate(rows):
        low, high = (f"{100 * bound:.2f}%" for bound in wilson_interval(won, count))
        rate, y = 100 * won / max(1, count), 14 * i + 7
        told = tag("title", f"{name}: {won}/{count}, {rate:.1f} % ({low} .. {high})")
        bar = tag("rect", x=0, y=y - 5, width=f"{rate:.2f}%", height=10, rx=2)
        whisker = tag("line", x1=low, x2=high, y1=y, y2=y, class_="whisker")
        ends = [tag("line", x1=x, x2=x, y1=y - 3, y2=y + 3, class_="whisker") for x in (low, high)]
        parts.append(tag("g", told, bar, whisker, *ends, class_=colour_class(colour)))
    return tag("svg", *parts, class_="bars", height=height, role="img", aria_label="success rates")


def share_bar(shares: Sequence[tuple[str, float]]) -> Markup:
    """Draw parts of a whole side by side, with their names and per cent under them.

    Args:
        shares: Name and size (0 or more, in any unit) of each part.
    """
    total = sum(size for _, size in shares) or 1.0
    parts, entries, left = [], [], 0.0
    for i, (name, size) in enumerate(shares):
        share = 100 * size / total
        rect = tag("rect", x=f"{left:.2f}%", y=0, width=f"{share:.2f}%", height=18)
        parts.append(tag("g", tag("title", f"{name}: {share:.1f} %"), rect, class_=f"s{i} part"))
        entries.append((f"{name} {share:.0f} %", i))
        left += share
    svg = tag("svg", *parts, class_="bars", height=18, role="img", aria_label="shares")
    return join([svg, legend(entries)])
