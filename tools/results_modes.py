"""Collecting and learning in turn, pipelined or at once: how long each takes to 80 % success.

Part of tools/make_results_page.py. A run's row comes from its training card and from
results/modes/NAME/clock.json: seconds of every part of the loop, and when training success, the
mean of the last 100 episodes, first was 80 %.
"""

from __future__ import annotations

from typing import Any

PARTS = ("rollout", "forward", "learn", "wait")


def mode_of(config: dict[str, Any]) -> str:
    """Return how a run of TD3+BC collected and learned."""
    if config["asynchronous"]:
        return "at once (`asynchronous`)"
    return "pipelined (the default)" if config["pipelined"] else "in turn"


def table(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return the table's lines.

    Args:
        runs: Training card and clock.json of each run.
    """
    if not runs:
        return ["None yet."]
    head = "| | seed | chunks/s | episodes/min | minutes to 80 % | chunks to 80 % |"
    lines = [
        f"{head} stepping | VLA in it | learning | waiting |",
        "| --- |" + " --- |" * 9,
    ]
    ordered = sorted(runs, key=lambda run: (mode_of(run[0]["config"]), run[0]["config"]["seed"]))
    for train, clock in ordered:
        config, reached = train["config"], clock["reached"]
        cells = [
            mode_of(config),
            str(config["seed"]),
            f"{train['results']['training']['chunks_per_second']:.1f}",
            f"{60 * clock['episodes'] / clock['seconds']:.0f}",
            "-" if reached is None else f"{reached['minutes']:.1f}",
            "-" if reached is None else f"{reached['chunks']:,}",
            *(f"{100 * clock['parts'][part] / clock['seconds']:.0f} %" for part in PARTS),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
