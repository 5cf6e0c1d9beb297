"""Put the tables of the hostile campaign and the soak into docs/reliability.md.

Usage: python tools/make_reliability_page.py [--campaign TABLE.json] [--soak SOAK.json]

What ``make test-hostile HOSTILE_ARGS="--out TABLE.json"`` and ``make soak SOAK_ARGS="--out
SOAK.json"`` wrote takes the place of what docs/reliability.json held; the tables are made of that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from page_blocks import fill_blocks, markdown_table

ROOT = Path(__file__).parent.parent
FIGURES, PAGE = ROOT / "docs" / "reliability.json", ROOT / "docs" / "reliability.md"


def campaign(result: dict[str, Any]) -> str:
    """Return the campaign's table with its conditions."""
    columns = ("group", "tried", "clear", "accepted", "nonsense", "raw", "late", "slowest_s")
    head = ("group", "tried", "clear error", "accepted", "accepted nonsense", "raw", "late")
    rows = [[str(row[name]) for name in columns] for row in result["rows"]]
    table = markdown_table([*head, "slowest (s of processor time)"], rows)
    return "\n".join([f"Seed {result['seed']}, {result['minutes']} minutes.", "", *table])


def soak(result: dict[str, Any]) -> str:
    """Return the soak's table with its conditions."""
    columns = {
        "signals": "signals to workers",
        "kills": "SIGKILLs of itself",
        "episodes": "episodes",
        "replays": "begun again",
    }
    rows = []
    for row in result["rows"]:
        growth = row.get("growth")
        memory = "-" if growth is None else f"{100 * growth:.1f} %"
        counts = [str(row.get(name, "-")) for name in columns]
        rows.append([row["part"], *counts, memory, "; ".join(row["problems"]) or "none"])
    head = ("command", *columns.values(), "memory", "problems")
    told = (
        f"Seed {result['seed']}, {result['minutes']} minutes, {result['cores']} cores that others "
        f"used as well (load average {result['load']}), a neighbour that took and freed "
        f"{result['pressure_gb']} GB."
    )
    return "\n".join([told, "", *markdown_table(head, rows)])


def main() -> None:
    """Take the results in, write the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--campaign", type=Path, help="JSON of the campaign")
    parser.add_argument("--soak", type=Path, help="JSON of the soak")
    options = parser.parse_args()
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in ("campaign", "soak"):
        if path := getattr(options, name):
            known[name] = json.loads(path.read_text())
    FIGURES.write_text(json.dumps(known, indent=1) + "\n")
    fill_blocks(PAGE, {"campaign": campaign(known["campaign"]), "soak": soak(known["soak"])})


if __name__ == "__main__":
    main()
