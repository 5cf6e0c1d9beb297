"""Keep result cards in results/, and make the tables of docs/results*.md of them.

Usage: python tools/make_results_page.py [--add GROUP/NAME RUN EVALUATION]

``--add`` copies the card of a training run, that of its evaluation by ``vla-gym eval --paired``
(the VLA on the same states; in libero_token the same run with the RL token) and the curve
of its training success to results/GROUP/NAME/, without the paths of this machine. GROUP: libero
(whole suites on LIBERO's own assets, see tools/results_suite.sh), libero_earlier (those with other
settings than the preset's of now), libero_token (without the RL token), long (libero_10, see
tools/results_long.sh), libero_on_policy (PPO and GRPO on a suite, on actions of mini-flow),
libero_flow (on its flow), libero_action_tokens (on tokens of mini-few), or, of the earlier mini-few
on lite, single, suite, ablation, suite_ablation, on_policy. The tables between the pages'
``<!-- begin ... -->`` and ``<!-- end ... -->`` lines are made of these cards alone
(results_tables.py), and so are the pictures (results_curves.py; with ``--add`` the group's alone).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
from page_blocks import fill_blocks
from results_curves import DOCS, RESULTS, draw_pairs, draw_tasks, write_all
from results_tables import (
    GROUPS,
    LIBERO_GROUPS,
    ON_POLICY_GROUPS,
    Card,
    blocks,
    task_panels,
    token_runs,
)

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.cards import difference, read_card
from vla_gym_trainers.report.curves import SUCCESS_KEYS, TRAINING, seconds_of
from vla_gym_trainers.report.data import read_rows

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / f"results{name}.md" for name in ("", "_runs", "_lite")]
NO_CURVES = ("libero_earlier", "libero_token", "ablation")
TASKS = {"libero_tasks": {"libero": ""}, "libero_on_policy_tasks": ON_POLICY_GROUPS}
_ENV_STEPS = "time/total_env_steps"


def add(place: str, run: Path, evaluation: Path) -> None:
    """Copy two cards into results/.

    Raises:
        ConfigError: If the group is unknown, or the evaluation is not paired with the VLA's or was
            played under other rules than the page's.
    """
    group, _, name = place.partition("/")
    if group not in GROUPS or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"Expected GROUP/NAME with GROUP one of {GROUPS}, got {place!r}.")
    card = read_card(evaluation / "card.json")
    if "paired" not in card.content["results"]:
        raise ConfigError(f"{evaluation} has no comparison: evaluate with --paired.")
    if card.protocol.get("first_seed") is not None:
        raise ConfigError(f"{evaluation} is of sampled layouts: evaluate on official states.")
    assets = "libero" if group in LIBERO_GROUPS else "lite"
    rules = {"name": None, "assets": assets, "physics": "fast", "variation": None}
    played = {key: card.protocol.get(key) for key in rules}
    played["assets"] = card.protocol["assets"]["name"]
    if what := difference(rules, played):
        raise ConfigError(f"{evaluation} was played under other rules than {group} has; {what}.")
    runs = str(run.resolve()).removesuffix(place)
    train = json.dumps(json.loads((run / "card.json").read_text()), indent=1) + "\n"
    points = ",\n".join(json.dumps(point) for point in curve_of(run))
    folder = RESULTS / group / name  # made once all three can be written
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.json").write_text(_without_machine(train, runs))
    (folder / "curve.json").write_text(f"[\n{points}\n]\n")
    (folder / "eval.json").write_text(_without_machine(_compact(card.content), runs))


def curve_of(run: Path) -> list[tuple[int, float, float]]:
    """Return (control steps, minutes, success of the training episodes), at most 100 points.

    Of TD3 of the last 100 episodes, the first 100 give none: short episodes end first, so it
    would be too good. Of PPO and GRPO of the last rollouts that hold 100 whole episodes.
    """
    rows = read_rows(run / "metrics.jsonl")
    seconds = seconds_of(rows)
    counted = any(_ENV_STEPS in row for row in rows)  # else a run's own steps are control steps
    points = []
    recent: list[tuple[float, float]] = []  # episodes and success of the last rollouts
    for row, time in zip(rows, seconds, strict=True):
        success = next((row[key] for key in SUCCESS_KEYS[TRAINING] if key in row), None)
        if success is not None and "rollout/episodes" in row:
            recent.append((row["rollout/episodes"], success))
            while sum(count for count, _ in recent[1:]) >= 100:
                recent.pop(0)
            counts, rates = zip(*recent, strict=True)
            success = float(np.average(rates, weights=counts)) if sum(counts) >= 100 else None
        steps = row.get(_ENV_STEPS) if counted else row["step"]  # None: the same chunk's second row
        played = row.get("rollout/success_episodes", row.get("time/episodes", 100))
        if success is not None and steps is not None and played >= 100:
            points.append((int(steps), round(float(time) / 60, 2), round(float(success), 4)))
    return [points[i] for i in sorted({round(i) for i in np.linspace(0, len(points) - 1, 100)})]


def _without_machine(text: str, runs: str) -> str:
    """Return JSON with paths below ``runs`` (ends with /) as runs/..., others as their name."""
    if runs.endswith("/"):
        text = text.replace(f'"{runs}', '"runs/')
    return re.sub(r'"/(?:[^"/]*/)*([^"/]+)"', r'"\1"', text)


def _compact(content: Card) -> str:
    """Return a card with one line an episode."""
    episodes = content["results"]["episodes"]
    head = {**content, "results": {**content["results"], "episodes": "@"}}
    rows = ",\n".join(json.dumps(episode) for episode in episodes)
    return json.dumps(head, indent=1).replace('"@"', f"[\n{rows}\n]") + "\n"


def main() -> None:
    """Take cards in, and make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", nargs=3, metavar=("GROUP/NAME", "RUN", "EVALUATION"))
    arguments = parser.parse_args()
    drawn = GROUPS
    if arguments.add:
        place, run, evaluation = arguments.add
        add(place, Path(run), Path(evaluation))
        group = place.partition("/")[0]
        drawn = tuple(g for g in GROUPS if g == group or (g, group) == ("on_policy", "suite"))
    tables = blocks()
    for page in PAGES:
        here = re.findall("<!-- begin (.*) -->", page.read_text(encoding="utf-8"))
        fill_blocks(page, {name: tables.pop(name) for name in here})
    if tables:
        raise SystemExit(f"No page has blocks {', '.join(tables)}.")
    write_all(tuple(group for group in drawn if group not in NO_CURVES))
    if "libero_token" in drawn:
        (DOCS / "results_libero_token.svg").write_bytes(draw_pairs(token_runs()))
    for picture, groups in TASKS.items():
        if not groups.keys().isdisjoint(drawn):
            (DOCS / f"results_{picture}.svg").write_bytes(draw_tasks(task_panels(groups)))


if __name__ == "__main__":
    main()
