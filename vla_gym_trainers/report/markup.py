"""HTML and SVG as nested calls: whatever is not markup already is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

# HTML's elements without content and end, as far as the page has any.
_VOID = ("img", "meta")


class Markup(str):
    """Text that is safe in a page as it stands."""

    __slots__ = ()


def join(parts: Iterable[Any]) -> Markup:
    """Return parts one after the other; those that are no markup are escaped, None is nothing."""
    return Markup(
        "".join(
            part if isinstance(part, Markup) else html.escape(str(part))
            for part in parts
            if part is not None
        )
    )


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """Return an element.

    Args:
        name: Of the element.
        children: Markup, or anything else as escaped text; None is left out.
        attributes: ``class_`` gives ``class``, ``stroke_width`` gives ``stroke-width``; None is
            left out, True gives the bare name.
    """
    text = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        text += f" {attribute}" if value is True else f' {attribute}="{html.escape(str(value))}"'
    if name in _VOID:
        return Markup(f"<{name}{text}>")
    return Markup(f"<{name}{text}>{join(children)}</{name}>")


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]], class_: str | None = None) -> Markup:
    """Return a table that scrolls sideways where it is too wide.

    Cells carry their column's name, if that is text, for styles without columns.
    """
    head = list(head)
    header = tag("tr", *(tag("th", cell) for cell in head))
    names = [None if isinstance(cell, Markup) else str(cell) or None for cell in head]
    body = [
        tag("tr", *(tag("td", c, data_name=n) for c, n in zip(row, names, strict=True)))
        for row in rows
    ]
    inner = tag("table", tag("thead", header), tag("tbody", *body), class_=class_)
    return tag("div", inner, class_="scroll")


def data_block(name: str, content: Any) -> Markup:
    """Return JSON in an element that a browser does not run, read by its id."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    # "</script>" and "<!--" would end or change the element.
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')
