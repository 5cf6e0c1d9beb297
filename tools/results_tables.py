"""Make the tables of docs/results*.md from the cards in results/.

Part of tools/make_results_page.py, whose groups are named there.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from page_blocks import markdown_table, rate
from results_curves import cards_of, kind_of

from vla_gym.suites import get_task
from vla_gym_trainers.evaluation.statistics import sign_test
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.runs.settings import load_preset
from vla_gym_trainers.td3.config import TD3RunConfig

#: Groups of PPO and GRPO on a suite, and what they train.
ON_POLICY_GROUPS = {
    "libero_on_policy": "a normal distribution",
    "libero_flow": "a flow",
    "libero_action_tokens": "tokens",
}
LIBERO_GROUPS = ("libero", "libero_earlier", "libero_token", "long", *ON_POLICY_GROUPS)
GROUPS = (*LIBERO_GROUPS, "single", "suite", "ablation", "suite_ablation", "on_policy")
#: Settings that say where or how long a run was made, not what it learned with.
_NOT_SHOWN = {"run_dir", "progress", "torch_threads", "seed", "task_ids", "suite", "videos"}
_NOT_SHOWN |= {"max_minutes", "eval_states", "checkpoint_every", "keep_checkpoints", "workers"}
_NOT_SHOWN |= {"eval_every", "eval_layouts", "eval_envs", "guard_layouts", "learn_threads"}
_NOT_SHOWN |= {"total_chunks", "total_timesteps", "total_steps"}
#: What a setting is compared with; where none is named, with what most runs have.
_PRESETS = {
    "libero_on_policy": {"ppo": "ppo_gaussian", "grpo": "grpo_gaussian"},
    "libero_flow": {"ppo": "ppo_flow", "grpo": "grpo_flow"},
    "libero_action_tokens": {"ppo": "ppo_goal", "grpo": "grpo_goal"},
    **dict.fromkeys(("libero", "libero_token"), {"td3": "td3_libero"}),
}
_TRAINERS: dict[str, Any] = {"td3": TD3RunConfig, "ppo": PPOConfig, "grpo": GRPOConfig}
Card = dict[str, Any]


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


def differing(group: str) -> list[dict[str, Any]]:
    """Return each run's settings other than the preset's, or than most runs' of its kind."""
    kinds: dict[str, list[Card]] = {}
    configs = [(train["kind"], _with_defaults(train)) for _, train, _ in load(group)]
    for kind, config in configs:
        kinds.setdefault(kind, []).append(config)
    presets = _PRESETS.get(group, {})
    usual = {kind: _usual(kind, found, presets.get(kind)) for kind, found in kinds.items()}
    return [
        {k: config[k] for k, v in usual[kind].items() if k in config and config[k] != v}
        for kind, config in configs
    ]


def table(group: str) -> list[str]:
    """Return a group's table; a row shows settings other than the preset's, or than most runs'."""
    runs = load(group)
    if not runs:
        return ["None yet."]
    rows = []
    for (name, train, evaluation), own in zip(runs, differing(group), strict=True):
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


def _usual(kind: str, configs: list[Card], preset: str | None) -> dict[str, Any]:
    """Return the settings in which runs differ, with the preset's; else most runs', or defaults."""
    known, usual = _defaults(kind, preset), {}
    for key in sorted({key for config in configs for key in config} - _NOT_SHOWN):
        values = Counter(json.dumps(config[key]) for config in configs if key in config)
        text, count = values.most_common(1)[0]
        if len(values) > 1:
            most = preset is None and 2 * count > values.total()
            usual[key] = json.loads(text) if most else known.get(key)
    return usual


def _defaults(kind: str, preset: str | None = None) -> dict[str, Any]:
    """Return a trainer's settings as they are by default, or with a preset."""
    known = vars(_TRAINERS[kind]()) | (vars(load_preset(_TRAINERS[kind], preset)) if preset else {})
    return json.loads(json.dumps(known, default=str))


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
    """Return successes a task of runs on whole suites: a table a suite, a column a run.

    Of libero_token, which has many, a row a run, with the difference to its partner.
    """
    suites: dict[str, list[tuple[str, Card]]] = {}
    for name, train, evaluation in load(group):
        if (ids := train["config"]["task_ids"]) is None or len(ids) > 1:
            suites.setdefault(train["config"]["suite"], []).append((name, evaluation["results"]))
    lines: list[str] = []
    for suite, runs in sorted(suites.items()):
        tasks = runs[0][1]["tasks"]
        won = [[task["num_successes"] for task in results["tasks"]] for _, results in runs]
        pairs = [results["paired"]["tasks"] for _, results in runs]
        if group == "libero_token":
            head = [suite, *(str(task["task_id"]) for task in tasks)]
            rows = [
                [name, *(f"{n} ({p['wins'] - p['losses']:+d})" for n, p in zip(*both, strict=True))]
                for (name, _), *both in zip(runs, won, pairs, strict=True)
            ]
        else:
            head, rows = [suite, "VLA", *(name for name, _ in runs)], []
            for place, task in enumerate(tasks):
                before = (str(p[place]["both"] + p[place]["losses"]) for p in pairs)
                what = f"{task['task_id']}: {task['instruction']}"
                rows.append(
                    [what, " / ".join(dict.fromkeys(before)), *(str(n[place]) for n in won)]
                )
        lines += ["", *markdown_table(head, rows)]
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


def token_runs() -> dict[str, list[tuple[Card, Card]]]:
    """Return settings and results of the runs of libero_token, by what actor and critics see."""
    groups: dict[str, list[tuple[Card, Card]]] = {}
    for name, train, evaluation in load("libero_token"):
        config = train["config"]
        seen = (
            "the mean of the hidden states" if config["rl_token"] == "mean" else "all hidden states"
        )
        if not config["use_rl_token"]:
            seen = "the VLA's chunk" if config["use_reference"] else "proprioception alone"
        seen += ", 20,032 chunks" if "-20000-chunks" in name else ""
        groups.setdefault(seen, []).append((config, evaluation["results"]))
    return dict(sorted(groups.items(), key=lambda group: ("," in group[0], -len(group[1]))))


def token_summary() -> list[str]:
    """Return the runs of libero_token together."""
    rows = []
    for seen, runs in token_runs().items():
        seeds: dict[str, list[str]] = {}
        for config, _ in runs:
            seeds.setdefault(config["suite"].removeprefix("libero_"), []).append(
                str(config["seed"])
            )
        played = "; ".join(f"{suite} {', '.join(numbers)}" for suite, numbers in seeds.items())
        rows.append([seen, played, *_together([results for _, results in runs])])
    head = ["in the token's place", "seeds", "with the token", "so", "wins : losses", "p"]
    return markdown_table(head, rows)


def _together(results: list[Card]) -> list[str]:
    """Return the cells of runs that are counted together: before, after, wins : losses, p."""
    n, ours = (sum(r["total"][key] for r in results) for key in ("num_episodes", "num_successes"))
    wins, losses = (sum(r["paired"]["total"][key] for r in results) for key in ("wins", "losses"))
    counts = [rate(ours + losses - wins, n), rate(ours, n), f"{wins} : {losses}"]
    return [*counts, f"{sign_test(wins, losses):.1g}"]


def preset_runs(group: str) -> list[tuple[str, Card, Card]]:
    """Return PPO's and GRPO's runs with all of their presets' settings and as many steps."""
    found = []
    for run, own in zip(load(group), differing(group), strict=True):
        kind, config = run[1]["kind"], run[1]["config"]
        preset = _defaults(kind, _PRESETS[group][kind])
        if not own and config["total_steps"] == preset["total_steps"]:
            found.append(run)
    return found


def task_panels(groups: dict[str, str]) -> dict[str, list[tuple[str, Card]]]:
    """Return kind and results of runs on whole suites by the titles of a picture's panels.

    Args:
        groups: Title of each group's panel, which has the runs with their presets' settings;
            where it is empty, all runs of the group, a panel a suite.
    """
    panels: dict[str, list[tuple[str, Card]]] = {}
    for group, title in groups.items():
        for name, train, card in preset_runs(group) if title else load(group):
            config = train["config"]
            if len(config["task_ids"] or ()) != 1:
                panel = title or config["suite"].removeprefix("libero_")
                panels.setdefault(panel, []).append((kind_of(group, name, train), card["results"]))
    return panels


def on_policy_summary() -> list[str]:
    """Return PPO's and GRPO's runs with their presets' settings, by what is trained."""
    rows = []
    for group, trained in ON_POLICY_GROUPS.items():
        runs = preset_runs(group)
        for kind in ("ppo", "grpo"):
            cards = [(train, card["results"]) for _, train, card in runs if train["kind"] == kind]
            if not cards:
                continue
            each = ", ".join(str(results["total"]["num_successes"]) for _, results in cards)
            seeds = ", ".join(str(train["config"]["seed"]) for train, _ in cards)
            minutes = ", ".join(f"{t['results']['training']['minutes']:.0f}" for t, _ in cards)
            changes = [
                (task["wins"] - task["losses"], task["task_id"])
                for _, results in cards
                for task in results["paired"]["tasks"]
            ]
            lowest = "{:+d} (task {})".format(*min(changes))
            what = [f"{kind.upper()}, {trained}", f"`{_PRESETS[group][kind]}`", seeds, minutes]
            rows.append([*what, each, *_together([results for _, results in cards]), lowest])
    head = ["trained", "preset", "seeds", "minutes", "each, of 500", "VLA", "policies"]
    return markdown_table([*head, "wins : losses", "p", "lowest task"], rows)


def blocks() -> dict[str, str]:
    """Return the pages' tables by the names of their blocks."""
    tables = {"libero_token_summary": token_summary(), "on_policy_summary": on_policy_summary()}
    for group in GROUPS:
        tables[group] = table(group)
        if group in ("libero", "libero_token", "long", *ON_POLICY_GROUPS, "suite"):
            tables[f"{group}_tasks"] = tasks_table(group)
        if group in ("libero", "suite"):
            tables[f"{group}_training"] = training_table(group)
    return {name: "\n".join(lines) for name, lines in tables.items()}
