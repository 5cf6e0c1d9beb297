"""What a section of the page is made of: plain data that ``template.html`` turns into HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vla_gym_trainers.report.data import Group


@dataclass(frozen=True)
class Cell:
    """A table cell that is more than text.

    Attributes:
        text: What it says.
        colour: Number of a group's colour, shown before the text.
        differs: Whether it is underlined, as not all of its row are the same.
    """

    text: str
    colour: int | None = None
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """A table; cells are text or :class:`Cell`.

    Attributes:
        head: Names of the columns.
        rows: As long as the head.
        folded: The line that unfolds it; None shows it at once.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    folded: str | None = None
    kind: str = "table"


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side.

    Attributes:
        pictures: Name and ``data:`` address of each.
        size: ``"large"``, ``"small"`` (many beside each other) or ``"wide"`` (one under the other).
        captions: Whether the names stand above the pictures.
    """

    pictures: Sequence[tuple[str, str]]
    size: str = "large"
    captions: bool = False
    kind: str = "pictures"


@dataclass(frozen=True)
class Legend:
    """Names beside their colours (None: the neutral one)."""

    entries: Sequence[tuple[str, int | None]]
    kind: str = "legend"


@dataclass(frozen=True)
class Text:
    """A paragraph (``"note"``) or a small heading (``"heading"``)."""

    text: str
    kind: str = "note"


@dataclass
class Section:
    """One section: what it shows and what it lacks."""

    title: str
    parts: list[Table | Pictures | Legend | Text] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def legend_of(groups: Sequence[Group]) -> Legend:
    """Return the legend of all groups."""
    return Legend([(group.label, group.index) for group in groups])


def compact(value: float) -> str:
    """Return a number in few characters: 12,500 as ``12.5k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.3g}"
