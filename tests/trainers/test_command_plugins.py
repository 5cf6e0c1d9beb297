"""Commands of ``vla-gym-train`` that other packages add."""

from importlib.metadata import EntryPoint

import pytest

from vla_gym_trainers import cli

CODE = '''
from dataclasses import dataclass

@dataclass
class Settings:
    """Count."""

    number: int = 1
    """How far."""

def main(settings: Settings) -> str:
    return f"counted to {settings.number}"

def untyped(settings):
    pass
'''


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    (tmp_path / "counting_plugin.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {"count": "main", "td3": "main", "untyped": "untyped", "lacking": "nothing"}
    points = [EntryPoint(n, f"counting_plugin:{v}", cli.GROUP) for n, v in values.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: points if group == cli.GROUP else [])


def test_it_is_listed_and_runs_with_its_settings(plug_in, capsys):
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert "\n  count        of counting_plugin\n" in usage
    assert "\n  td3          TD3+BC" in usage and usage.count("\n  td3 ") == 1  # ours stays
    assert cli.main(["count", "--number", "3"]) == 0
    assert capsys.readouterr().out == "counted to 3\n"


def test_its_options_are_completed(plug_in, capsys, monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", {})
    assert cli.main(["--print-completion"]) == 0
    script = capsys.readouterr().out
    assert "--number" in script and 'untyped) words=""' in script


@pytest.mark.parametrize("command", ["untyped", "lacking"])
def test_one_that_is_no_function_of_settings_is_told(plug_in, one_error, command):
    error = one_error(cli.main, command)
    assert f"command '{command}' of counting_plugin:" in error
    assert "expected a function of one argument" in error
