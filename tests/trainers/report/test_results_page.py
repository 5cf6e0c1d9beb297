"""The committed results: what is kept of a run, and that the page says what the cards say."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not (ROOT / "results").is_dir():
        pytest.skip("results/ is not here: it belongs to the repository, not to the package")
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("make_results_page")


def test_tables_are_those_of_the_cards(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    for group in tool.GROUPS:
        block = re.search(rf"<!-- begin {group} -->\n(.*?)\n<!-- end {group} -->", page, re.DOTALL)
        assert block is not None
        assert block[1].splitlines() == tool.table(group)


def test_cards_hold_no_paths_of_a_machine(tool: ModuleType) -> None:
    files = list(tool.RESULTS.glob("*/*/*.json"))
    assert files
    for file in files:
        assert not re.search(r'"/[^"]', file.read_text()), file


def test_paths_are_cut(tool: ModuleType) -> None:
    text = json.dumps({"a": "/home/me/runs/single/x", "b": "/home/me/other/card.json", "c": "1/2"})
    expected = {"a": "runs/single/x", "b": "card.json", "c": "1/2"}
    assert json.loads(tool._without_machine(text, "/home/me/runs/")) == expected


def test_tables_of_whole_suites(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Task 0: VLA 1 + 2 = 3 of 50, run a 9, run b 8; lowest window 0.3, last ten blocks 0.55."""

    def run(successes: list[int], lowest: float | None) -> tuple[dict, dict]:
        blocks = [0.1, *([0.5, 0.6] * 5), 0.9]
        training = {"warmup_success": 0.4, "warmup_episodes": 70, "lowest_success_1000": lowest}
        training["success_by_100_episodes"] = blocks
        train = {"config": {"suite": "goal", "task_ids": [0, 1]}, "results": {"training": training}}
        tasks = [
            {"task_id": i, "instruction": f"do {i}", "num_successes": n, "num_episodes": 50}
            for i, n in enumerate(successes)
        ]
        paired = [{"task_id": i, "both": 1 + i, "losses": 2} for i in range(2)]
        return train, {"results": {"tasks": tasks, "paired": {"tasks": paired}}}

    runs = [("a", *run([9, 20], 0.3)), ("b", *run([8, 21], None))]
    monkeypatch.setattr(tool, "load", lambda _: runs)
    lines = tool.tasks_table("suite")
    assert lines[0] == "| goal | VLA | a | b |"
    assert lines[2:] == ["| 0: do 0 | 3 | 9 | 8 |", "| 1: do 1 | 4 | 20 | 21 |"]
    assert tool.training_table("suite")[2:] == ["| a | 70 | 40.0 % | 30.0 % | 55.0 % |"]


@pytest.mark.parametrize(
    ("kind", "task_ids", "what"),
    [
        ("td3", [0, 1], "goal"),
        ("td3", [7], "goal 7: turn on the stove"),
        ("grpo", None, "grpo, goal"),
        ("ppo", [7], "ppo, goal 7: turn on the stove"),
    ],
)
def test_a_row_says_what_was_trained(
    tool: ModuleType, kind: str, task_ids: list[int] | None, what: str
) -> None:
    """The VLA 20 + 5 = 25 of 100, the policy 60: Wilson 18 to 34 and 50 to 69 %."""
    config = {"suite": "libero_goal", "task_ids": task_ids, "seed": 3}
    training = {"minutes": 9.96, "env_steps": 12345}
    train = {"kind": kind, "config": config, "results": {"training": training}}
    paired = {"both": 20, "losses": 5, "wins": 40, "p_value": 1.6e-7}
    total = {"num_episodes": 100, "num_successes": 60}
    found = tool.row(train, {"results": {"total": total, "paired": {"total": paired}}}, {})
    rates = ["25/100 (18-34 %)", "60/100 (50-69 %)"]
    assert found == [what, "3", "-", "12,345", "10.0", *rates, "40 : 5", "2e-07"]


def test_curves_begin_with_a_hundred_episodes_and_leave_pauses_out(
    tool: ModuleType, tmp_path: Path
) -> None:
    """Of fewer the short, successful ones have ended first; the minutes count from the start."""
    rows = [
        {"step": 8 * i, "wall_s": 1000.0 + 60 * i + (5000 if i > 2 else 0), "time/seconds": 60 * i}
        | {"rollout/success_rate": i / 10, "time/total_env_steps": 64 * i}
        | {"time/episodes": 33 * i + 1}
        for i in range(1, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert tool.curve_of(tmp_path) == [(192, 3.0, 0.3), (256, 4.0, 0.4)]


def test_a_curve_of_rollouts_spans_a_hundred_episodes(tool: ModuleType, tmp_path: Path) -> None:
    """60 episodes alone are too few; (30 + 12) / 120, then (12 + 54) / 120, then 110 alone."""
    played = [(60, 0.5), (60, 0.2), (60, 0.9), (110, 0.9)]
    rows = [
        {"step": 64 * i, "wall_s": 60.0 * i, "time/seconds": 60.0 * i}
        | {"rollout/episodes": float(count), "rollout/success": rate}
        for i, (count, rate) in enumerate(played, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert tool.curve_of(tmp_path) == [(128, 2.0, 0.35), (192, 3.0, 0.55), (256, 4.0, 0.9)]


def test_pictures_show_runs_of_one_kind_in_one_colour(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ablations by their names; PPO and GRPO beside TD3+BC on the same suite, not on another."""
    curves = importlib.import_module("results_curves")
    assert tool.CURVES  # the fixture has put the tools on the path
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
    earlier = {"kind": "grpo", "config": {"suite": "goal", "task_ids": None, "baseline": "length"}}
    assert curves.kind_of("on_policy", "x", earlier) == "grpo, goal, baseline by length"
    picture = curves.draw("on_policy").decode()
    assert picture.count("grpo, goal") == 1 and "td3, goal" in picture
    assert curves.draw("single") is None


def test_settings_are_told_where_they_are_not_as_in_most_runs(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = json.loads((ROOT / "results/suite_ablation/base-s0/train.json").read_text())
    evaluation = json.loads((ROOT / "results/suite_ablation/base-s0/eval.json").read_text())

    def shown(*changes: dict[str, object]) -> list[str]:
        runs = [
            (
                "run",
                {**base, "config": {**base["config"], "learning_starts": 5000, **change}},
                evaluation,
            )
            for change in changes
        ]
        monkeypatch.setattr(tool, "load", lambda _: runs)
        return [line.split("|")[3].strip() for line in tool.table("suite_ablation")[2:]]

    # The default is 2000: most runs have 5000, which is not worth a word.
    assert shown({}, {}, {"learning_starts": 40000}) == ["-", "-", "`learning_starts=40000`"]
    # What an older card lacks was as it is by default; where a run was made does not matter.
    assert shown({}, {"aggregation": "episodes"}, {}) == ["-", "`aggregation=episodes`", "-"]
    assert shown({}, {"aggregation": "tokens", "learn_threads": 2}) == ["-", "-"]
    # Where no value is that of most, those that are not the default are told.
    assert shown({"utd_ratio": 2.0}, {"utd_ratio": 5.0}) == ["-", "`utd_ratio=5.0`"]
