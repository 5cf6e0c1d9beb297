"""PPO with a slow VLA, collecting and learning in turn or asynchronously: time, age, success.

Part of tools/make_results_page.py. A row comes from the training
card in results/async/NAME/train.json and from clock.json there: seconds of every part of the loop,
and how slow the VLA was made.
"""

from __future__ import annotations

from typing import Any

from page_blocks import rate

HEAD = (
    "VLA / simulation",
    "",
    "seed",
    "rollouts",
    "minutes",
    "rollout",
    "learning",
    "waiting",
    "chunks 0 / 1 updates old",
    "training success, last quarter",
    "VLA",
    "policy",
)


def table(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return the table's lines.

    Args:
        runs: Training card and clock.json of each run.
    """
    if not runs:
        return ["None yet."]
    lines = [f"| {' | '.join(HEAD)} |", "| --- |" + " --- |" * (len(HEAD) - 1)]
    for train, clock in sorted(runs, key=_order):
        config, training = train["config"], train["results"]["training"]
        evaluation, ages = train["results"]["evaluation"], training["staleness_chunks"]
        success = [value for _, value in training["success"]]
        last = success[-max(1, len(success) // 4) :]
        parts, totals = clock["parts"], [evaluation[who]["total"] for who in ("start", "policy")]
        cells = [
            f"{clock['slowness']['factor']:g}",
            "asynchronous" if config["asynchronous"] else "in turn",
            str(config["seed"]),
            str(training["rollouts"]),
            f"{training['minutes']:.1f}",
            *(f"{parts[part] / 60:.1f}" for part in ("rollout", "learn", "wait")),
            f"{ages.get('0', 0):,} / {ages.get('1', 0):,}",
            f"{100 * sum(last) / len(last):.0f} %",
            *(rate(t["num_successes"], t["num_episodes"]) for t in totals),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _order(run: tuple[dict[str, Any], dict[str, Any]]) -> tuple[float, int, bool]:
    config = run[0]["config"]
    return run[1]["slowness"]["factor"], config["seed"], config["asynchronous"]
