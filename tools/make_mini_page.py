"""Put the counts of result cards into docs/mini.json, docs/mini.md and the model cards.

Usage: python tools/make_mini_page.py [CARD ...]

The cards are those of ``vla-gym eval`` for the shipped checkpoints (docs/mini.md has the
commands). A card takes the place of an earlier one of the same checkpoint, head, temperature,
phrasing, suite and asset pack; rows of checkpoints that are not the shipped ones any more go. The
tables between the pages' ``<!-- begin ... -->`` and ``<!-- end ... -->``
lines are made of docs/mini.json alone; nothing in them is typed by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_blocks import fill_blocks, markdown_table, rate, read_rows, write_rows

from vla_gym.rollout.vla_policy import vla_identity
from vla_gym.suites import suite_tasks
from vla_gym_trainers.evaluation.cards import read_card
from vla_gym_trainers.evaluation.statistics import wilson_interval

ROOT = Path(__file__).parent.parent
COUNTS, PAGE = ROOT / "docs" / "mini.json", ROOT / "docs" / "mini.md"
WEIGHTS = ROOT / "vla_gym" / "weights"
CHECKPOINTS = ("mini", "mini-few", "mini-flow")
SUITES = ("spatial", "object", "goal")
VARIANTS = ("flow", "l1", "token", "token T=1", "l1 held-out words")
PACKS = ("libero", "lite")
Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    """Return one row for each suite of a card: who played, counts a task, confusion if recorded."""
    card = read_card(path)
    policy, results = card.protocol["policy"], card.content["results"]
    variant = policy["head"]
    if policy.get("temperature"):
        variant += f" T={policy['temperature']:g}"
    if policy.get("phrasing"):
        variant += " held-out words"
    confusion = {entry["suite"]: entry for entry in results.get("confusion", [])}
    rows = []
    for suite in card.protocol["tasks"]:
        tasks = [task for task in results["tasks"] if task["suite"] == suite]
        row = {
            "checkpoint": policy["vla"]["name"],
            "sha256": policy["vla"]["sha256"],
            "variant": variant,
            "suite": suite,
            "assets": card.protocol["assets"]["name"],
            "episodes": card.protocol["episodes"],
            "successes": [task["num_successes"] for task in tasks],
            "mean_steps": [
                None if task["mean_success_length"] is None else round(task["mean_success_length"])
                for task in tasks
            ],
        }
        if suite in confusion:
            row["confusion"] = {k: confusion[suite][k] for k in ("decided", "right", "matrix")}
        rows.append(row)
    return rows


def key(row: Row) -> tuple[int, ...]:
    """Return what a row is replaced and sorted by."""
    order = (PACKS, "assets"), (CHECKPOINTS, "checkpoint"), (VARIANTS, "variant"), (SUITES, "suite")
    return tuple(known.index(row[name]) for known, name in order)


def percent(successes: int, n: int) -> str:
    """Return a rate with Wilson's 95 % interval, in percent."""
    low, high = wilson_interval(successes, n)
    return f"{100 * successes / n:.1f} ({100 * low:.0f} to {100 * high:.0f})"


def columns_of(rows: list[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """Return the rows of every pack, checkpoint and head, by suite."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        column = row["assets"], row["checkpoint"], row["variant"]
        found.setdefault(column, {})[row["suite"]] = row
    return found


def summary(rows: list[Row]) -> list[str]:
    """Return the table of suites."""
    lines = []
    for (pack, checkpoint, variant), own in columns_of(rows).items():
        cells = [pack, f"`{checkpoint}`", variant]
        for wanted in (*((suite,) for suite in SUITES), SUITES):
            chosen = [own[suite] for suite in wanted if suite in own]
            successes = sum(sum(row["successes"]) for row in chosen)
            episodes = sum(row["episodes"] * len(row["successes"]) for row in chosen)
            cells.append(percent(successes, episodes) if len(chosen) == len(wanted) else "")
        lines.append(cells)
    return markdown_table(("pack", "checkpoint", "head", *SUITES, "all"), lines)


def tasks(rows: list[Row]) -> list[str]:
    """Return the table of tasks: successes and mean steps of each checkpoint and head."""
    columns = columns_of(rows)
    lines = [
        [f"{suite} {i}: {task.instruction}"]
        + [_cell(own[suite], i) if suite in own else "" for own in columns.values()]
        for suite in SUITES
        for i, task in enumerate(suite_tasks(suite))
    ]
    heads = (f"{pack}: `{name}` {variant}" for pack, name, variant in columns)
    return markdown_table(["task", *heads], lines)


def _cell(row: Row, task: int) -> str:
    text, steps = rate(row["successes"][task], row["episodes"]), row["mean_steps"][task]
    return text if steps is None else f"{text}, {steps} steps"


def confusion(rows: list[Row]) -> list[str]:
    """Return one matrix a checkpoint: instruction against the first goal that became true."""
    lines: list[str] = []
    for row in rows:
        if "confusion" not in row:
            continue
        found = row["confusion"]
        share = percent(found["right"], found["decided"])
        lines += [
            f"{row['assets']}: `{row['checkpoint']}`, {row['variant']} head: the right one in "
            f"{found['right']} of {found['decided']} decided episodes, {share} %.",
            "",
        ]
        told_rows = []
        for told, task in enumerate(suite_tasks("goal")):
            counts = found["matrix"].get(str(told), {})
            cells = [str(counts.get(str(i), "")) for i in range(10)]
            none = row["episodes"] - sum(counts.values())
            told_rows.append([f"{told}: {task.instruction}", *cells, str(none or "")])
        lines += [
            *markdown_table(["told \\ achieved", *map(str, range(10)), "none"], told_rows),
            "",
        ]
    return lines[:-1]


BLOCKS: dict[str, Callable[[list[Row]], list[str]]] = {
    "summary": summary,
    "tasks": tasks,
    "confusion": confusion,
}


def fill(path: Path, rows: list[Row], blocks: tuple[str, ...]) -> None:
    """Make a page's tables anew."""
    fill_blocks(path, {name: "\n".join(BLOCKS[name](rows)) for name in blocks})


def main() -> None:
    """Take the cards in, write the counts and the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cards", nargs="*", type=Path, help="result cards of vla-gym eval")
    rows = {key(row): row for row in read_rows(COUNTS)}
    for path in parser.parse_args().cards:
        rows |= {key(row): row for row in rows_of(path)}
    shipped = {name: vla_identity(WEIGHTS / name)["sha256"] for name in CHECKPOINTS}
    ordered = [rows[k] for k in sorted(rows) if rows[k]["sha256"] == shipped[rows[k]["checkpoint"]]]
    write_rows(COUNTS, ordered)
    fill(PAGE, ordered, tuple(BLOCKS))
    for name in CHECKPOINTS:
        own = [row for row in ordered if row["checkpoint"] == name]
        fill(WEIGHTS / name / "README.md", own, ("summary",))


if __name__ == "__main__":
    main()
