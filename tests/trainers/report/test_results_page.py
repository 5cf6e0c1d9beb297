"""The committed results: what is kept of a run, and that the page says what the cards say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import make_results_page as tool
import make_robustness_page as robustness
import pytest
import results_curves as curves
import results_tables as tables

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.runs.settings import TEST_SEED, load_preset


def test_tables_are_those_of_the_cards() -> None:
    more = {f"{group}_{what}" for group in ("libero", "suite") for what in ("tasks", "training")}
    more |= {"long_tasks", "libero_token_tasks", "libero_token_summary", "on_policy_summary"}
    more |= {f"{group}_tasks" for group in tables.ON_POLICY_GROUPS}
    blocks = tables.blocks()
    assert {*tool.GROUPS, *more} == set(blocks)
    text = "".join(page.read_text() for page in tool.PAGES)
    for name, block in blocks.items():
        assert text.count(f"<!-- begin {name} -->\n{block}\n<!-- end {name} -->") == 1, name


def test_runs_that_see_the_same_are_counted_together(monkeypatch):
    def run(name, suite, successes, wins, losses, **seen):
        config = {"rl_token": "auto", "use_rl_token": True, "use_reference": True, **seen}
        paired = {"total": {"wins": wins, "losses": losses}}
        total = {"num_episodes": 50, "num_successes": successes}
        evaluation = {"results": {"total": total, "paired": paired}}
        return name, {"config": {**config, "suite": suite, "seed": 7}}, evaluation

    alone = {"use_rl_token": False, "use_reference": False}
    runs = [
        run("goal-s7-mean", "libero_goal", 40, 3, 1, rl_token="mean"),
        run("goal-s7-alone", "libero_goal", 30, 0, 8, **alone),
        run("spatial-s7-alone", "spatial", 20, 1, 3, **alone),
    ]
    monkeypatch.setattr(tables, "load", {"libero_token": runs}.__getitem__)
    *_, both, mean = tables.token_summary()
    assert "alone | goal 7; spatial 7 | 60/100 (50-69 %) | 50/100 (40-60 %) | 1 : 11 |" in both
    assert "hidden states | goal 7 | 38/50 (63-86 %) | 40/50 (67-89 %) | 3 : 1 | 0.6 |" in mean


def test_runs_of_a_preset_are_counted_together(monkeypatch):
    """Neither one with another KL nor one with more steps; the lowest task is of any run."""
    preset = load_preset(PPOConfig, "ppo_goal")

    def run(name, seed, successes, tasks, kl_coef, steps=preset.total_steps):
        pairs = [
            {"task_id": task_id, "wins": wins, "losses": losses}
            for task_id, (wins, losses) in enumerate(tasks)
        ]
        wins, losses = (sum(pair[key] for pair in pairs) for key in ("wins", "losses"))
        paired = {"tasks": pairs, "total": {"wins": wins, "losses": losses}}
        total = {"num_episodes": 50, "num_successes": successes}
        training = {"training": {"minutes": 60.4 + seed}}
        config = {"seed": seed, "kl_coef": kl_coef, "total_steps": steps}
        config |= {"suite": "goal", "task_ids": None}
        train = {"kind": "ppo", "config": config, "results": training}
        return name, train, {"results": {"total": total, "paired": paired}}

    kl = preset.kl_coef
    runs = [
        run("ppo-goal-s0", 0, 40, [(20, 0), (0, 1)], kl),
        run("ppo-goal-s0-kl-coef-9", 0, 10, [(0, 9)], 9.0),
        run("ppo-goal-s0-99", 0, 10, [(0, 9)], kl, 99),
        run("ppo-goal-s7", 7, 30, [(9, 0), (0, 4)], kl),
    ]
    groups = dict.fromkeys(tables.ON_POLICY_GROUPS, []) | {"libero_action_tokens": runs}
    monkeypatch.setattr(tables, "load", groups.__getitem__)
    assert tables.on_policy_summary()[2:] == [
        "| PPO, tokens | `ppo_goal` | 0, 7 | 60, 67 | 40, 30 | 46/100 (37-56 %) | 70/100 (60-78 %)"
        " | 29 : 5 | 4e-05 | -4 (task 1) |"
    ]
    panels = tables.task_panels(tables.ON_POLICY_GROUPS)
    assert [kind for kind, _ in panels["tokens"]] == ["ppo-goal", "ppo-goal"]


def test_every_run_without_the_token_is_in_one_row_of_table_and_picture() -> None:
    rows = tables.token_runs()
    assert sum(map(len, rows.values())) == len(tables.load("libero_token"))
    picture = curves.draw_pairs(rows)
    assert picture.count(b"<use") >= 2 * sum(map(len, rows.values()))  # two dots each
    assert picture == (curves.DOCS / "results_libero_token.svg").read_bytes()


def test_tasks_of_runs_without_the_token_stand_beside_their_partners(monkeypatch) -> None:
    tasks = [{"task_id": 4, "num_successes": 40}, {"task_id": 7, "num_successes": 30}]
    pairs = [{"wins": 3, "losses": 1}, {"wins": 0, "losses": 8}]
    results = {"tasks": tasks, "paired": {"tasks": pairs}}
    runs = [("goal-s7-mean", {"config": {"task_ids": None, "suite": "goal"}}, {"results": results})]
    monkeypatch.setattr(tables, "load", {"libero_token": runs}.__getitem__)
    assert tables.tasks_table("libero_token")[::2] == [
        "| goal | 4 | 7 |",
        "| goal-s7-mean | 40 (+2) | 30 (-8) |",
    ]


def test_cards_of_other_conditions_are_refused_or_told_apart(tmp_path):
    content = json.loads(
        (tool.RESULTS / "libero_earlier" / "spatial-first" / "eval.json").read_text()
    )
    path = tmp_path / "card.json"
    for change, suite in [({}, "spatial"), ({"variation": "strong"}, "spatial strong")]:
        path.write_text(json.dumps(content | {"protocol": content["protocol"] | change}))
        (row,) = robustness.rows_of("TD3+BC", path)
        assert (row["suite"], row["successes"], row["episodes"]) == (suite, 420, 500)
    path.write_text(json.dumps(content | {"protocol": content["protocol"] | {"variation": "mild"}}))
    with pytest.raises(ConfigError, match="no variation or strong"):
        robustness.rows_of("TD3+BC", path)
    lite = {"assets": {"name": "lite", "digest": ""}}
    for change in ({"name": "openpi"}, {"physics": "exact"}, {"variation": "mild"}, lite):
        path.write_text(json.dumps(content | {"protocol": content["protocol"] | change}))
        with pytest.raises(ConfigError, match=f"other rules than libero has; {next(iter(change))}"):
            tool.add("libero/x", tmp_path, tmp_path)
    for row in content["results"]["episodes"]:
        row["seed"], row["init_state_id"] = TEST_SEED + row["init_state_id"], -1
    content["protocol"]["first_seed"] = TEST_SEED
    path.write_text(json.dumps(content))
    for refuses in (
        lambda: robustness.rows_of("TD3+BC", path),
        lambda: tool.add("libero/x", tmp_path, tmp_path),
    ):
        with pytest.raises(ConfigError, match="official states"):
            refuses()


def test_cards_hold_no_paths_of_a_machine() -> None:
    files = list(tool.RESULTS.glob("*/*/*.json"))
    assert files
    for file in files:
        assert not re.search(r'"/[^"]', file.read_text()), file


def test_curves_begin_with_a_hundred_episodes_and_leave_pauses_out(tmp_path):
    """Of fewer the short, successful ones have ended first; the minutes count from the start."""
    rows = [
        {"step": 8 * i, "wall_s": 1000.0 + 60 * i + (5000 if i > 2 else 0), "time/seconds": 60 * i}
        | {"rollout/success_rate": i / 10, "time/total_env_steps": 64 * i}
        | {"time/episodes": 33 * i + 1}
        for i in range(1, 5)
    ]
    rows.append({k: v for k, v in rows[-1].items() if k != "time/total_env_steps"})  # logged again
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert tool.curve_of(tmp_path) == [(192, 3.0, 0.3), (256, 4.0, 0.4)]
    counted = [row | {"rollout/success_episodes": row["time/episodes"] // 2 * 2} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, counted)) + "\n")
    assert tool.curve_of(tmp_path) == [(192, 3.0, 0.3), (256, 4.0, 0.4)]
    counted[2]["rollout/success_episodes"] = 60  # the others began inside demonstrations
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, counted)) + "\n")
    assert tool.curve_of(tmp_path) == [(256, 4.0, 0.4)]


def test_a_curve_of_rollouts_spans_a_hundred_episodes(tmp_path: Path) -> None:
    """60 episodes alone are too few; (30 + 12) / 120, then (12 + 54) / 120, then 110 alone."""
    played = [(60, 0.5), (60, 0.2), (60, 0.9), (110, 0.9)]
    rows = [
        {"step": 64 * i, "wall_s": 60.0 * i, "time/seconds": 60.0 * i}
        | {"rollout/episodes": float(count), "rollout/success": rate}
        for i, (count, rate) in enumerate(played, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert tool.curve_of(tmp_path) == [(128, 2.0, 0.35), (192, 3.0, 0.55), (256, 4.0, 0.9)]


def test_pictures_show_runs_of_one_kind_in_one_colour(monkeypatch, tmp_path):
    """Ablations by their names; PPO and GRPO beside TD3+BC on the same suite, not on another."""
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    for place, kind, suite in [
        ("suite/goal-s0", "td3", "goal"),
        ("suite/object-s0", "td3", "object"),
        ("on_policy/grpo-s0", "grpo", "libero_goal"),
        ("on_policy/grpo-s1", "grpo", "libero_goal"),
        ("suite_ablation/no-bc-s0", "td3", "goal"),
    ]:
        (tmp_path / place).mkdir(parents=True)
        config = {"suite": suite, "task_ids": None}
        (tmp_path / place / "train.json").write_text(json.dumps({"kind": kind, "config": config}))
        (tmp_path / place / "curve.json").write_text("[[64, 1.0, 0.1], [128, 2.0, 0.2]]")
    found = [(folder.name, kind) for folder, kind in curves.runs_of("on_policy")]
    assert found == [("grpo-s0", "grpo, goal"), ("grpo-s1", "grpo, goal"), ("goal-s0", "td3, goal")]
    assert [kind for _, kind in curves.runs_of("suite_ablation")] == ["no-bc"]
    stride = {"kind": "td3", "config": {"suite": "goal", "task_ids": None, "stride": 2}}
    assert curves.kind_of("suite", "goal-stride2-s0", stride) == "td3, goal, stride 2"
    name = "spatial-s0-max-minutes-45"
    assert curves.kind_of("libero", name, stride) == "spatial-max-minutes-45"
    before = "10-s0-gamma-0.995", stride
    assert curves.kind_of("long", *before) == "10-gamma-0.995", "another curve than 10-s0's"
    earlier = {"kind": "grpo", "config": {"suite": "goal", "task_ids": None, "baseline": "length"}}
    assert curves.kind_of("on_policy", "x", earlier) == "grpo, goal, baseline by length"
    picture = curves.draw("on_policy").decode()
    assert picture.count("grpo, goal") == 1 and "td3, goal" in picture
    assert curves.draw("single") is None
