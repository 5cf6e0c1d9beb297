"""``vla-gym doctor``: what this machine has, what is missing, and the exact mend.

:data:`CHECKS` is the list: a name and a function that returns a finding. What may crash or hang
runs in a process of its own, with a deadline: ``probes.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from vla_gym.cli.doctor.asking import Ask, Finding, Status, ask
from vla_gym.cli.doctor.system import (
    check_assets,
    check_cache,
    check_limits,
    check_packages,
    check_python,
    check_shared_memory,
    check_weights,
)
from vla_gym.cli.doctor.tried import (
    check_cuda,
    check_gl,
    check_imports,
    check_settle,
    check_speed,
)

__all__ = ["CHECKS", "Check", "as_json", "ask", "check_gl", "print_report", "run_checks"]

_PIPED_WIDTH = 120  # columns of a report that goes into a file


@dataclass(frozen=True)
class Check:
    """A finding with the name of its check; see :class:`Finding`."""

    name: str
    status: Status
    value: str
    mend: str = ""


#: Name of a check, the check, whether it takes seconds.
CHECKS: tuple[tuple[str, Callable[[Ask], Finding], bool], ...] = (
    ("python", check_python, False),
    ("packages", partial(check_packages, None), False),
    ("trainers", partial(check_packages, "trainers"), False),
    ("cache", check_cache, False),
    ("assets: lite", partial(check_assets, "lite"), False),
    ("assets: libero", partial(check_assets, "libero"), False),
    ("weights: mini", partial(check_weights, "mini"), False),
    ("weights: mini-few", partial(check_weights, "mini-few"), False),
    ("shared memory", check_shared_memory, False),
    ("limits", check_limits, False),
    ("gl", check_gl, False),
    ("imports", check_imports, True),
    ("cuda", check_cuda, True),
    ("settle", check_settle, True),
    ("speed", check_speed, True),
)


def run_checks(*, quick: bool = False) -> list[Check]:
    """Run every check in the order of :data:`CHECKS`.

    Args:
        quick: Leave out what takes seconds: imports, CUDA, settling, speed.

    Returns:
        One :class:`Check` each; a check that breaks is reported as failed.
    """
    remembered = cache(ask)  # two checks look at the same probe
    checks = []
    for name, check, is_slow in CHECKS:
        if quick and is_slow:
            continue
        try:
            finding = check(remembered)
        except Exception as error:  # the report must come out whatever is broken
            finding = Finding("fail", f"{type(error).__name__}: {error}", "Install vla-gym again.")
        checks.append(Check(name, *finding))
    return checks


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
