"""Put the counts of result cards into docs/robustness.json and the table of docs/robustness.md.

Usage: python tools/make_robustness_page.py [NAME=CARD ...]

A card of ``vla-gym eval`` on suites, their LIBERO-PRO variants, or suites with ``--variation
strong`` takes the place of what an earlier one of the same name said about the same suite. The
table is made of docs/robustness.json alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from page_blocks import fill_blocks, markdown_table, rate, read_rows, write_rows

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.cards import read_card

ROOT = Path(__file__).parent.parent
COUNTS, PAGE = ROOT / "docs" / "robustness.json", ROOT / "docs" / "robustness.md"
SUITES = ("spatial", "object", "goal", "10")
VARIANTS = ("", "-swap", "-object", "-lan", "-task", " strong")
HEAD = ("policy", "suite", "as it is", "swap", "object", "lan", "task", "`--variation strong`")


def rows_of(name: str, path: Path) -> list[dict[str, Any]]:
    """Return one row for each suite of a card: successes and episodes over its tasks."""
    card = read_card(path)
    look = card.protocol.get("variation")
    if card.protocol.get("first_seed") is not None or look not in (None, "strong"):
        raise ConfigError(f"{path}: expected official states, and no variation or strong.")
    return [
        {
            "policy": name,
            "suite": f"{suite} {look}" if look else suite,
            "assets": card.protocol["assets"]["name"],
            "successes": sum(episode.success for episode in own),
            "episodes": len(own),
        }
        for suite in card.protocol["tasks"]
        if (own := [episode for episode in card.episodes if episode.suite == suite])
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each policy and suite, a column for each variant."""
    cells = {(row["policy"], row["suite"]): rate(row["successes"], row["episodes"]) for row in rows}
    lines = [
        [name, suite, *(cells.get((name, suite + variant), "") for variant in VARIANTS)]
        for name in dict.fromkeys(row["policy"] for row in rows)
        for suite in SUITES
        if any((name, suite + variant) in cells for variant in VARIANTS)
    ]
    return markdown_table(HEAD, lines)


def main() -> None:
    """Take the cards in, write the counts and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cards", nargs="*", metavar="NAME=CARD", help="who played, and the card")
    rows = {(row["policy"], row["suite"]): row for row in read_rows(COUNTS)}
    for text in parser.parse_args().cards:
        name, _, path = text.partition("=")
        rows |= {(row["policy"], row["suite"]): row for row in rows_of(name, Path(path))}
    write_rows(COUNTS, rows.values())
    fill_blocks(PAGE, {"robustness": "\n".join(table(list(rows.values())))})


if __name__ == "__main__":
    main()
