"""A report: read from its file, shown on a terminal, written into a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.cli.bench.spec import LEGEND
from vla_gym.cli.bench.tables import Table, tables
from vla_gym.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
_LABEL_WIDTH = 32  # names up to this length stay on one line of a terminal
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def load_report(path: Path) -> dict[str, Any]:
    """Read a report that ``--json`` wrote.

    Raises:
        ConfigError: If it is none.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a report of vla-gym bench --json ({error}).") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ConfigError(f"{path}: expected a report of vla-gym bench --json, format {FORMAT}.")
    return report


def conditions(report: Mapping[str, Any]) -> list[str]:
    """Return lines on machine, versions, actions and packs."""
    machine, versions = report["machine"], report["versions"]
    packs = ", ".join(f"{name} {digest[:12]}" for name, digest in report["assets"].items())
    threads = report["threads"]["LP_NUM_THREADS"]
    return [
        f"{report['date']}, `{report['command']}`, {report['seconds']:.0f} s.",
        LEGEND,
        "Medians of the rounds ± half their range; ratios are those of the same round.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_mb'] / 1e3:.0f} GB, "
        f"OpenGL: {machine['gl']}; load when it began: {machine['load']:.1f}.",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        f"Asset packs: {packs or 'none'}. Actions: {report['actions']['source']}, "
        f"sha256 {report['actions']['sha256'][:12]}. Threads of a software renderer: {threads} "
        "a worker.",
        *report["notes"],
        *([] if report["complete"] else ["Interrupted before its end."]),
    ]


def print_tables(found: Sequence[Table], console: Console) -> None:
    """Print tables on a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table as RichTable

    for table in found:
        shown = RichTable(
            title=escape(table.title), title_justify="left", title_style="bold", box=SIMPLE_HEAD
        )
        for index, heading in enumerate(table.headings):
            if index == 0:
                longest = max((len(row[0]) for row in table.rows), default=0)
                shown.add_column(heading, no_wrap=longest <= _LABEL_WIDTH)
            else:
                shown.add_column(heading, justify="right")
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
        for note in table.notes:
            console.print(note, markup=False, highlight=False)
        console.print()


def print_conditions(report: Mapping[str, Any], console: Console) -> None:
    """Print what a report was measured on, and how."""
    for line in conditions(report):
        console.print(line, markup=False, highlight=False)


def markdown(report: Mapping[str, Any]) -> str:
    """Return a report's tables in Markdown."""
    blocks = ["\n".join(f"- {line}" for line in conditions(report))]
    for table in tables(report):
        lines = [f"### {table.title}", "", _row(table.headings)]
        lines.append("| --- |" + " ---: |" * (len(table.headings) - 1))
        lines += [_row(row) for row in table.rows]
        if table.notes:
            lines += ["", *(f"- {note}" for note in table.notes)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def write_page(report: Mapping[str, Any], page: Path) -> None:
    """Replace what stands between the bench markers of a Markdown page.

    Raises:
        ConfigError: If the page cannot be read or lacks the markers.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page}: expected a Markdown page ({error}).") from None
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page}: expected the lines {BEGIN!r} and {END!r} in it.")
    page.write_text(f"{head}{BEGIN}\n\n{markdown(report)}\n{END}{tail}", encoding="utf-8")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
