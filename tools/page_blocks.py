"""Markdown tables and their places in a page: ``<!-- begin X -->`` to ``<!-- end X -->``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_gym_trainers.evaluation.statistics import wilson_interval


def fill_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace the text of each named block; the page stays as it is if one is missing.

    Raises:
        SystemExit: If the page has not exactly one block of a name.
    """
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        replace = lambda m, b=block: f"{m[1]}{b}\n{m[2]}"  # noqa: E731
        text, count = re.subn(pattern, replace, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{page} has {count} blocks {name!r}, expected one.")
    page.write_text(text, encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that :func:`write_rows` wrote; none without the file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON list, a line a row."""
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def rate(successes: int, n: int) -> str:
    """Return successes of n with Wilson's 95 % interval in percent: ``20/50 (28-54 %)``."""
    low, high = wilson_interval(successes, n)
    return f"{successes}/{n} ({100 * low:.0f}-{100 * high:.0f} %)"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    rule = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
