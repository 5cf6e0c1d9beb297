"""The command line: help with defaults, exit codes, one clear line for a mistake."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from vla_gym import __version__
from vla_gym.cli import main as cli
from vla_gym_trainers.cli import main as train


def test_usage_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"\n  {command} " in text


@pytest.mark.parametrize(("name", "main"), [("vla-gym", cli.main), ("vla-gym-train", train)])
def test_both_programs_tell_their_version_and_commands(name, main, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{name} {__version__}\n"
    assert main([]) == 2 and "commands:" in capsys.readouterr().out
    assert main(["fly"]) == 2 and "Unknown command 'fly': expected " in capsys.readouterr().err


def test_a_broken_command_of_another_package_hides_no_other(monkeypatch, capsys, one_error):
    monkeypatch.setattr(
        cli, "entry_points", lambda group: [EntryPoint("broken", "no_such_module:main", group)]
    )
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "\n  tasks " in text and "broken: no_such_module:main cannot be imported" in text
    assert cli.main(["tasks", "--suite", "goal"]) == 0
    assert "cannot be imported: ModuleNotFoundError" in one_error(cli.main, "broken")


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_shows_defaults(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"vla-gym {command}" in text
    assert "default" in text


def test_unknown_option():
    with pytest.raises(SystemExit) as stop:
        cli.main(["tasks", "--fly"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tasks", "--suite", "gaol"], "Unknown suite 'gaol'"),
        (["play", "--task-id", "10"], "task_id 10 is out of range"),
        (["play", "--policy", "nobody.zip"], "there is no such file"),
        (["play", "--assets", "/nonexistent"], "/nonexistent"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, expected, one_error):
    assert expected in one_error(cli.main, *arguments)


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path, capsys):
    (file := tmp_path / "notes.txt").touch()
    assert train(["rl-token", "--assets", "lite", "--run-dir", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"error: {file}" in error and error.count("\n") == 1


def run_into_closed_pipe(arguments: list[str], lines: int) -> tuple[int, str]:
    """Run a command whose reader goes after some lines; return its status and what it complains."""
    command = [sys.executable, "-m", "vla_gym.cli.main", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, text=False
    )
    assert process.stdout is not None and process.stderr is not None
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    complaints = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(timeout=120), complaints


@pytest.mark.parametrize(("arguments", "lines"), [(["tasks"], 0), (["tasks", "--json"], 1)])
def test_a_reader_that_goes_ends_nothing(arguments, lines):
    assert run_into_closed_pipe(arguments, lines) == (0, "")


def test_completion_of_commands_options_and_files(tmp_path):
    script = tmp_path / "completion.bash"
    command = [sys.executable, "-m", "vla_gym.cli.main", cli.COMPLETION]
    script.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    ask = """
        source "$0"
        complete -p vla-gym
        for words in "do" "tasks --s" "tasks --suite go"; do
            COMP_WORDS=(vla-gym $words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _vla_gym; echo "${COMPREPLY[@]}"
        done
    """
    bash = ["bash", "-c", ask, str(script)]
    told = subprocess.run(bash, check=True, capture_output=True, text=True).stdout.splitlines()
    assert told == ["complete -o default -F _vla_gym vla-gym", "doctor", "--suite", ""]
