"""A sample of the hostile campaign, its verdicts, and the soak for a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine import Case, Nonsense, command, run_cases, table

from vla_gym.cli.main import main as cli
from vla_gym.errors import ConfigError

HERE = Path(__file__).parent


def fails(error: BaseException) -> None:
    raise error


def test_each_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine

    monkeypatch.setattr(engine, "HANG_S", 3.0)
    tries = {
        "accepted": lambda _: None,
        "clear": lambda _: fails(ConfigError("x must be 1, got 2.")),
        "clear, a command": lambda _: command(cli, "tasks", "--suite", "nonsense"),
        "clear, a parser": lambda _: command(cli, "tasks", "--sweet", "goal"),
        "raw": lambda _: fails(KeyError("x")),
        "raw, too long": lambda _: fails(ConfigError("x" * 5000)),
        "raw, a process that dies": lambda _: os._exit(3),
        "nonsense": lambda _: fails(Nonsense("NaN")),
        "late": lambda _: time.sleep(60),
    }
    cases = [Case("a", name, run) for name, run in tries.items()]
    cases.append(Case("a", "nonsense, wanted", lambda _: None, wanted="clear"))
    outcomes = list(run_cases(cases))
    found = {outcome.case.name: outcome.verdict for outcome in outcomes}
    assert found == {name: name.partition(",")[0] for name in found} and len(found) == len(cases)
    row = table(outcomes)[-1]
    assert [row[key] for key in ("tried", "clear", "raw", "late")] == [10, 3, 3, 1]


def run(program: str, out: Path, *arguments: str) -> dict:
    """Run a command of this folder: it ends well, or its output is the failure."""
    done = subprocess.run(
        [sys.executable, str(HERE / program), "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.timeout(280, func_only=True)
def test_a_sample_of_the_campaign_is_refused_clearly(tmp_path: Path) -> None:
    options = ["--cases", "30", "--seed", "7", "--every", "3"]
    rows = run("campaign.py", tmp_path / "table.json", *options)["rows"]
    assert len(rows) > 10 and rows[-1]["tried"] >= 60
    assert all(row["tried"] for row in rows)


@pytest.mark.hostile
@pytest.mark.timeout(3000, func_only=True)
def test_the_whole_campaign_is_refused_clearly(tmp_path: Path) -> None:
    assert run("campaign.py", tmp_path / "table.json")["rows"][-1]["tried"] >= 500


@pytest.mark.slow
@pytest.mark.timeout(3000, func_only=True)
def test_a_short_soak(tmp_path: Path) -> None:
    rows = run("soak.py", tmp_path / "soak.json", "--minutes", "2", "--quick")["rows"]
    assert len(rows) == 5 and sum(row.get("signals", 0) + row.get("kills", 0) for row in rows) > 2
