"""A check's result and how a list of them is shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

_PIPED_WIDTH = 120  # columns of a report that goes into a file
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was looked at.
        status: ``"ok"``, ``"warn"`` (works, but not all of it, or slowly) or ``"fail"``.
        value: What was found.
        mend: What to do about it; empty when ok.
    """

    name: str
    status: Status
    value: str
    mend: str = ""


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the report as plain data: ``{"ok": bool, "checks": [{name, status, ...}]}``."""
    return {
        "ok": all(check.status != "fail" for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def print_report(checks: Sequence[Check]) -> None:
    """Show the report as a table, then the mends, then one line that sums up."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(title="vla-gym doctor", title_justify="left", show_edge=False)
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = Text(check.status, style=colours[check.status])
        table.add_row(check.name, mark, Text(check.value))
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    console.print(table)
    for check in checks:
        if check.mend:
            line = Text(f"\n{check.name}: ", style=colours[check.status])
            console.print(line.append(check.mend, style="default"), soft_wrap=True)
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    verdict = f"{failed} to mend" if failed else "vla-gym works here"
    warnings = f", {warned} warning{'s' if warned > 1 else ''}" if warned else ""
    console.print(f"\n{verdict}{warnings}.")
