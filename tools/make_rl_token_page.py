"""Put result cards into docs/rl_token.json, and the tables of docs/rl_token.md.

Usage: python tools/make_rl_token_page.py [CARD ...]

The cards are those of ``vla-gym-train rl-token`` and ``vla-gym-train probe`` (docs/rl_token.md has
the commands). A card takes the place of an earlier one of the same command and VLA. The tables
between the page's ``<!-- begin ... -->`` and ``<!-- end ... -->`` lines are made of
docs/rl_token.json alone; nothing in them is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from page_blocks import fill_blocks, read_rows

from vla_gym_trainers.rl_token.probes import format_probes
from vla_gym_trainers.rl_token.reconstruction import format_reports

DOCS = Path(__file__).parent.parent / "docs"
RESULTS, PAGE = DOCS / "rl_token.json", DOCS / "rl_token.md"
Row = dict[str, Any]


def row_of(path: Path) -> Row:
    """Return what the page needs of a card."""
    card = json.loads(path.read_text(encoding="utf-8"))
    if card.get("kind") not in ("rl-token", "probe"):
        raise SystemExit(f"{path} is no card of 'vla-gym-train rl-token' or 'probe'.")
    return {
        "kind": card["kind"],
        "vla": Path(card["config"]["vla"]).name,
        "seed": card["config"]["seed"],
        "assets": card["config"]["assets"],
        "results": card["results"],
    }


def pretraining(rows: list[Row]) -> str:
    """Return a table of explained variance for every VLA."""
    parts = []
    for row in rows:
        if row["kind"] == "rl-token":
            train, held = (row["results"]["states"][key] for key in ("train", "held_out"))
            seconds = row["results"]["seconds"]
            both = " both" if len(row["results"]["tokens"]) > 1 else ""
            parts.append(
                f"`{row['vla']}`: {train['states']} states of {train['episodes']} episodes "
                f"({train['expert']} of experts, {train['vla']} of the VLA, {train['demos']} of "
                f"demonstrations), {held['states']} states of {held['episodes']} other episodes "
                f"to report on; {seconds['states']:.0f} s to collect, {seconds['training']:.0f} s "
                f"to train{both}:\n\n{format_reports(row)}"
            )
    return "\n\n".join(parts)


def probes(rows: list[Row]) -> str:
    """Return the tables of probes for every VLA."""
    parts = []
    for row in rows:
        if row["kind"] == "probe":
            counts = row["results"]["states"]
            parts.append(
                f"`{row['vla']}`: {counts['train']} states to fit, {counts['test']} of other "
                f"episodes to test, the object at rest in {counts['test_resting']} of them.\n\n"
                f"{format_probes(row['results'])}"
            )
    return "\n\n".join(parts)


def main() -> None:
    """Take the cards in, write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cards", nargs="*", type=Path, help="result cards")
    rows = {(row["kind"], row["vla"]): row for row in read_rows(RESULTS)}
    for path in parser.parse_args().cards:
        row = row_of(path)
        rows[row["kind"], row["vla"]] = row
    ordered = [rows[key] for key in sorted(rows)]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    fill_blocks(PAGE, {"pretraining": pretraining(ordered), "probes": probes(ordered)})


if __name__ == "__main__":
    main()
