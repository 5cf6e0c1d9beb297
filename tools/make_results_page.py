"""Keep result cards in results/ and make the tables of docs/results.md and results_lite.md of them.

Usage: python tools/make_results_page.py [--add GROUP/NAME RUN EVALUATION]

``--add`` copies the card of a training run, that of its evaluation by ``vla-gym eval --paired``
(the VLA on the same states; in libero_token the same run with the RL token) and the curve
of its training success to results/GROUP/NAME/, without the paths of this machine. GROUP: libero
(whole suites on LIBERO's own assets, see tools/results_suite.sh), libero_earlier (those with other
settings than the preset's of now), libero_token (without the RL token), long (libero_10, see
tools/results_long.sh), libero_on_policy (PPO and GRPO on a suite), or, of the earlier mini-few on
lite, single, suite, ablation, suite_ablation, on_policy. The tables between the pages'
``<!-- begin ... -->`` and ``<!-- end ... -->`` lines are made of these cards alone, and so are the
pictures (results_curves.py; with ``--add`` the group's alone).
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from page_blocks import fill_blocks, markdown_table, rate
from results_curves import RESULTS, cards_of, partner_of, write_all

from vla_gym.errors import ConfigError
from vla_gym.suites import get_task
from vla_gym_trainers.evaluation.cards import difference, read_card
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.report.curves import SUCCESS_KEYS, TRAINING, seconds_of
from vla_gym_trainers.report.data import read_rows
from vla_gym_trainers.td3.config import TD3RunConfig

ROOT = Path(__file__).parent.parent
PAGE, LITE_PAGE = ROOT / "docs" / "results.md", ROOT / "docs" / "results_lite.md"
LIBERO_GROUPS = ("libero", "libero_earlier", "libero_token", "long", "libero_on_policy")
GROUPS = (*LIBERO_GROUPS, "single", "suite", "ablation", "suite_ablation", "on_policy")
CURVES = tuple(group for group in GROUPS if group not in ("libero_earlier", "ablation"))
#: Settings that say where or how long a run was made, not what it learned with.
_NOT_SHOWN = {"run_dir", "progress", "torch_threads", "seed", "task_ids", "suite", "videos"}
_NOT_SHOWN |= {"max_minutes", "eval_states", "checkpoint_every", "keep_checkpoints", "workers"}
_NOT_SHOWN |= {"eval_every", "eval_layouts", "eval_envs", "guard_layouts", "learn_threads"}
_NOT_SHOWN |= {"total_chunks", "total_timesteps", "total_steps"}
_TRAINERS: dict[str, Any] = {"td3": TD3RunConfig, "ppo": PPOConfig, "grpo": GRPOConfig}
Card = dict[str, Any]
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
        if success is not None and steps is not None and row.get("time/episodes", 100) >= 100:
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


def load(group: str) -> list[tuple[str, Card, Card]]:
    """Return (name, training card, evaluation card) of each run of a group."""
    return [
        (folder.name, train, json.loads((folder / "eval.json").read_text()))
        for folder, train in cards_of(group)
    ]


def row(train: Card, evaluation: Card, differing: dict[str, Any]) -> list[str]:
    """Return one row of a table."""
    config, training = train["config"], train["results"]["training"]
    total = evaluation["results"]["total"]
    paired = evaluation["results"]["paired"]["total"]
    n, ours = total["num_episodes"], total["num_successes"]
    theirs = paired["both"] + paired["losses"]
    ids = config["task_ids"]
    suite = config["suite"].removeprefix("libero_")
    what = suite if train["kind"] == "td3" else f"{train['kind']}, {suite}"
    if ids is not None and len(ids) == 1:  # None: all of the suite
        what += f" {ids[0]}: {get_task(suite, ids[0]).instruction}"
    steps = training.get("env_steps")
    return [
        what,
        str(config["seed"]),
        ", ".join(f"`{key}={value}`" for key, value in differing.items()) or "-",
        "-" if steps is None else f"{steps:,}",
        f"{training['minutes']:.1f}",
        rate(theirs, n),
        rate(ours, n),
        f"{paired['wins']} : {paired['losses']}",
        f"{paired['p_value']:.1g}",
    ]


def table(group: str) -> list[str]:
    """Return a group's table; a row shows in which settings it is not as most of its algorithm."""
    runs = load(group)
    if not runs:
        return ["None yet."]
    kinds: dict[str, list[Card]] = {}
    for _, train, _ in runs:
        kinds.setdefault(train["kind"], []).append(_with_defaults(train))
    usual = {kind: _usual(kind, configs) for kind, configs in kinds.items()}
    rows = []
    for name, train, evaluation in runs:
        config, expected = _with_defaults(train), usual[train["kind"]]
        own = {k: config[k] for k, v in expected.items() if k in config and config[k] != v}
        cells = row(train, evaluation, own)
        rows.append([name, *cells[1:]] if group in LIBERO_GROUPS else cells)
    first = "run" if group in LIBERO_GROUPS else "task"
    other = _compared_with(group)
    head = (
        f"{first} | seed | setting | control steps | minutes | {other} | policy | wins : losses | p"
    )
    return markdown_table(head.split(" | "), rows)


def _compared_with(group: str) -> str:
    """Return what a group's runs are paired with."""
    return "with the token" if group == "libero_token" else "VLA"


def _usual(kind: str, configs: list[Card]) -> dict[str, Any]:
    """Return the settings in which runs differ, with what over half of them have or the default."""
    defaults, usual = _defaults(kind), {}
    for key in sorted({key for config in configs for key in config} - _NOT_SHOWN):
        values = Counter(json.dumps(config[key]) for config in configs if key in config)
        text, count = values.most_common(1)[0]
        if len(values) > 1:
            most = 2 * count > values.total()
            usual[key] = json.loads(text) if most else defaults.get(key)
    return usual


def _defaults(kind: str) -> dict[str, Any]:
    """Return a trainer's settings as they are by default."""
    return json.loads(json.dumps(vars(_TRAINERS[kind]()), default=str))


def _with_defaults(train: Card) -> Card:
    """Return a run's settings, with those that its card, of an earlier version, lacks."""
    # What the trainers did before these two were settings is not what their defaults do.
    known = _defaults(train["kind"]) | {"bc_beside_demos": 1.0, "aggregation": "tokens"}
    known |= train["config"]
    known["prior_demos"] = bool(known.get("prior_demos"))
    if not known["prior_demos"]:
        known.pop("bc_beside_demos")  # nothing that it says how to learn from
        known.pop("demo_starts", None)
    return known


def tasks_table(group: str) -> list[str]:
    """Return successes a task of runs on whole suites: a table a suite, a column a run."""
    suites: dict[str, list[tuple[str, Card]]] = {}
    for name, train, evaluation in load(group):
        if (ids := train["config"]["task_ids"]) is None or len(ids) > 1:
            suites.setdefault(train["config"]["suite"], []).append((name, evaluation["results"]))
    lines: list[str] = []
    for suite, runs in sorted(suites.items()):
        # Of two runs that are compared with the same one it is told once.
        others = {partner_of(name): results["paired"]["tasks"] for name, results in runs}
        rows = []
        for place, task in enumerate(runs[0][1]["tasks"]):
            wins = [str(results["tasks"][place]["num_successes"]) for _, results in runs]
            pairs = [tasks[place] for tasks in others.values()]
            before = [str(p["both"] + p["losses"]) for p in pairs]
            vla = " / ".join(before if group == "libero_token" else dict.fromkeys(before))
            name = f"{task['task_id']}: {task['instruction']}"
            rows.append([name, vla, *wins])
        lines += [
            "",
            *markdown_table([suite, _compared_with(group), *(name for name, _ in runs)], rows),
        ]
    return lines[1:] or ["None yet."]


def training_table(group: str) -> list[str]:
    """Return how training success of a group's runs compares with the VLA's, same noise."""
    rows = []
    for name, train, _ in load(group):
        training = train["results"]["training"]
        lowest = training.get("lowest_success_1000")
        if lowest is not None:
            last = training["success_by_100_episodes"][-11:-1]  # the last block may be short
            rates = [training["warmup_success"], lowest, sum(last) / len(last)]
            rows.append(
                [name, f"{training['warmup_episodes']}", *(f"{100 * r:.1f} %" for r in rates)]
            )
    head = ["run", "warm-up episodes", "VLA in them", "lowest 1,000 episodes"]
    head.append("last ten whole hundreds")
    return markdown_table(head, rows) if rows else ["None yet."]


def blocks() -> dict[Path, dict[str, str]]:
    """Return each page's tables by the names of their blocks."""
    found: dict[Path, dict[str, str]] = {PAGE: {}, LITE_PAGE: {}}
    for group in GROUPS:
        tables = found[PAGE if group in LIBERO_GROUPS else LITE_PAGE]
        tables[group] = "\n".join(table(group))
        if group in ("libero", "libero_token", "long", "libero_on_policy", "suite"):
            tables[f"{group}_tasks"] = "\n".join(tasks_table(group))
        if group in ("libero", "suite"):
            tables[f"{group}_training"] = "\n".join(training_table(group))
    return found


def main() -> None:
    """Take cards in, and make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", nargs=3, metavar=("GROUP/NAME", "RUN", "EVALUATION"))
    arguments = parser.parse_args()
    drawn = CURVES
    if arguments.add:
        place, run, evaluation = arguments.add
        add(place, Path(run), Path(evaluation))
        group = place.partition("/")[0]
        drawn = tuple(g for g in CURVES if g == group or (g, group) == ("on_policy", "suite"))
    for page, tables in blocks().items():
        fill_blocks(page, tables)
    write_all(drawn)


if __name__ == "__main__":
    main()
