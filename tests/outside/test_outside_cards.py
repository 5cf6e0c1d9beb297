"""Cards and rows from elsewhere: eval --paired and --resume, eval-merge, report."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_runs import eval_card
from spoilt_files import spoil

from vla_gym.cli import main as cli
from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.cards import RowsFile, read_card, starts_of
from vla_gym_trainers.evaluation.merge_command import MergeConfig, run_merge

DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return eval_card(tmp_path / "whole", {0: [True, False], 1: [True, True]}) / "card.json"


EVAL = [
    ("protocol.tasks", {"goal": [-1]}),
    ("protocol.episodes", 10**30),
    ("protocol.policy", {"kind": "vla"}),
    ("protocol.policy", {"kind": "vla", "vla": {"name": 3}, "head": "l1"}),
    ("protocol.policy.vla", {"name": "mini", "options": {"adapters": 3}}),
    ("environment", [1]),
    ("wall_seconds", -1),
    ("results.episodes.0.success", "yes"),
    ("results.paired", {"with": 5}),
    ("protocol", DEEP),
]


@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
@pytest.mark.parametrize(("place", "value"), EVAL, ids=[str(x)[:60] for x in EVAL])
def test_a_damaged_card_of_eval_is_one_clear_error(
    place: str, value: Any, card: Path, tmp_path: Path, one_error: Any
) -> None:
    read_card(card)
    bad = spoil(Path(shutil.copy(card, tmp_path / "bad.json")), place, value)
    field = place.split(".")[0]
    page = ["report", str(bad), "--out", str(tmp_path / "page.html")]
    for arguments in (["eval-merge", str(bad), str(card)], page):
        error = one_error(cli.main, *arguments)
        assert len(error) < 500
        assert str(bad) in error and (field in error or value is DEEP), error


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:1] + ['{"episode": {"suite": 5}, "seconds": 1}'] + lines[1:],
        lambda lines: ["[]"] + lines[1:],
        lambda _: [],
    ],
)
def test_damaged_rows_are_one_clear_error(
    change: Callable[[list[str]], list[str]], card: Path, tmp_path: Path
) -> None:
    whole = read_card(card)
    rows = RowsFile(tmp_path / "card.json", {"protocol": whole.protocol})
    rows.begin()
    for episode in whole.episodes[:2]:
        rows.append(episode, 1.0, {"gl_renderer": "x"})
    assert rows.read() == (list(whole.episodes[:2]), 1.0, [{"gl_renderer": "x"}] * 2)
    lines = change(rows.path.read_text().splitlines())
    rows.path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ConfigError, match="is damaged, line [12]"):
        rows.read()


@pytest.mark.timeout(10, func_only=True)
def test_the_number_of_episodes_is_bounded_before_they_are_listed(card: Path) -> None:
    protocol = read_card(card).protocol
    with pytest.raises(ConfigError, match="asks for 300000 episodes .* at most 200000"):
        starts_of({**protocol, "tasks": {"goal": [0, 1, 2]}, "episodes": 100_000})
    spoil(card, "protocol.tasks", {str(i): [0, 1, 2] for i in range(900)})
    spoil(card, "protocol.episodes", 1000)
    with pytest.raises(ConfigError, match="at most 200000"):
        run_merge(MergeConfig((card,)))
