"""Tables of an evaluation for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Larger matrices do not fit into a terminal; the card has them.
MAX_MATRIX = 12
# Columns of a table that is written to a file or another program.
PIPED_WIDTH = 120
_new_table = partial(Table, title_justify="left", show_edge=False)


def print_results(results: Mapping[str, Any], title: str = "") -> None:
    """Print the tables of a card's results: successes, confusion, comparison."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(results_table(results, title))
    for confusion in results.get("confusion", ()):
        print_confusion(confusion, console)
    if "paired" in results:
        console.print(paired_table(results["paired"]))


def title_of(protocol: Mapping[str, Any]) -> str:
    """Return who played in which world, by which rules."""
    rest = {"protocol": protocol.get("name"), "variation": protocol.get("variation")}
    rest["layouts from seed"] = protocol.get("first_seed")
    words = [f"{what} {value}" for what, value in rest.items() if value]
    world = f"assets {protocol['assets']['name']}"
    return ", ".join([policy_name(protocol["policy"]), world, *words])


def policy_name(identity: Mapping[str, Any]) -> str:
    """Return a policy's name in words."""
    kind = identity["kind"]
    if kind == "vla":
        trained = f"{identity['run']}, trained " if identity.get("run") else ""
        name = f"{trained}VLA {vla_name(identity['vla'])}, {identity['head']} head"
        if identity.get("phrasing") == "held-out":
            name += ", held-out words"
        if "temperature" in identity:
            name += f", T = {identity['temperature']:g}, seed {identity.get('seed')}"
        return name
    if kind == "trained":
        return f"trained policy {identity['sha256'][:8]} on VLA {vla_name(identity['vla'])}"
    return f"random actions, seed {identity['seed']}" if kind == "random" else "scripted expert"


def vla_name(identity: Mapping[str, Any]) -> str:
    """Return a VLA's name, with its options if it has any."""
    options = dict(identity.get("options", {}))
    if "adapters" in options:  # a digest
        options["adapters"] = options["adapters"][:8]
    words = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{identity['name']} ({words})" if words else str(identity["name"])


def results_table(results: Mapping[str, Any], title: str) -> Table:
    """Return the table of tasks, suites and total."""
    table = _new_table(title=escape(title))
    table.add_column("task", no_wrap=True)
    table.add_column("instruction", ratio=1, overflow="fold")
    for heading in ("success", "rate", "95 % (Wilson)", "mean steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = results["tasks"]
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1]["suite"] != row["suite"]
        name = f"{row['suite']} {row['task_id']}"
        table.add_row(
            name, escape(row["instruction"]), *_figures(row, "success_rate"), end_section=last
        )
    sums = [(row["suite"], row) for row in results["suites"]]
    if len(sums) > 1:
        sums.append(("total", results["total"]))
    for name, row in sums:
        what = f"mean over {row['num_tasks']} task{'s' * (row['num_tasks'] != 1)}"
        table.add_row(name, what, *_figures(row, "mean_over_tasks"), style="bold")
    return table


def _figures(row: Mapping[str, Any], rate: str) -> tuple[str, str, str, str]:
    low, high = row["wilson_95"]
    length = row["mean_success_length"]
    return (
        f"{row['num_successes']}/{row['num_episodes']}",
        f"{100 * row[rate]:.1f} %",
        f"{100 * low:.1f} .. {100 * high:.1f}",
        "-" if length is None else f"{length:.0f}",
    )


def print_confusion(confusion: Mapping[str, Any], console: Console) -> None:
    """Print which goals were achieved under which instruction."""
    decided, right = confusion["decided"], confusion["right"]
    matrix = confusion["matrix"]
    achieved = sorted({int(a) for row in matrix.values() for a in row})
    columns = sorted({*map(int, matrix), *achieved})
    if len(columns) <= MAX_MATRIX:
        table = _new_table(title=f"{confusion['suite']}: told x achieved first")
        table.add_column("told", justify="right")
        for task_id in columns:
            table.add_column(str(task_id), justify="right")
        for told, row in matrix.items():
            cells = [
                f"[{'green' if str(a) == told else 'red'}]{row[str(a)]}[/]"
                if str(a) in row
                else "[dim]·[/]"
                for a in columns
            ]
            table.add_row(told, *cells)
        console.print(table)
    text = f"{confusion['suite']}: {decided} of {confusion['num_episodes']} episodes decided"
    if decided:
        low, high = confusion["wilson_95"]
        text += (
            f"; the right task in {right} of them ({100 * confusion['right_share']:.1f} %, "
            f"{100 * low:.1f} .. {100 * high:.1f})"
        )
    console.print(text, highlight=False)


def paired_table(paired: Mapping[str, Any]) -> Table:
    """Return the table of a comparison on the same states."""
    table = _new_table(title=escape(f"Same states as {policy_name(paired['policy'])}"))
    for heading in ("task", "wins", "losses", "both", "neither", "p (McNemar, exact)"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for index, row in enumerate(paired["tasks"]):
        last = index + 1 == len(paired["tasks"])
        table.add_row(f"{row['suite']} {row['task_id']}", *_comparison(row), end_section=last)
    table.add_row("total", *_comparison(paired["total"]), style="bold")
    return table


def _comparison(row: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (str(row[key]) for key in ("wins", "losses", "both", "neither"))
    return (*numbers, f"{row['p_value']:.3g}")
