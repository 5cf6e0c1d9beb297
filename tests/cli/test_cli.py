"""The command line: help with defaults, exit codes, one clear line for a mistake."""

from __future__ import annotations

import pytest

from vla_gym.cli import main as cli
from vla_gym.errors import AssetError


def test_usage_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"\n  {command} " in text
    assert cli.main([]) == 2


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_shows_defaults(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"vla-gym {command}" in text
    assert "default" in text


def test_unknown_command_and_option(capsys):
    assert cli.main(["fly"]) == 2
    assert "Unknown command 'fly': expected doctor" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["tasks", "--fly"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tasks", "--suite", "gaol"], "Unknown suite 'gaol'"),
        (["play", "--task-id", "10"], "task_id 10 is out of range"),
        (["play", "--suite", "gaol"], "Unknown suite 'gaol'"),
        (["play", "--policy", "nobody.zip"], "there is no such file"),
        (["play", "--assets", "/nonexistent"], "/nonexistent"),
        (["demos", "--suite", "gaol"], "Unknown suite 'gaol'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, expected, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_package_errors_become_exit_code_2(monkeypatch, capsys):
    def fail(_):
        raise AssetError("expected a pack, got nothing: do this")

    monkeypatch.setitem(cli.COMMANDS, "doctor", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "error: expected a pack, got nothing: do this\n"
