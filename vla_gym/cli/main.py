"""``vla-gym doctor | tasks | play | ...``; each command imports what it needs itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from vla_gym.cli.options import parse_options
from vla_gym.cli.pipes import outlive_readers
from vla_gym.disk_full import disk_full_advice, is_disk_full
from vla_gym.errors import ConfigError, VlaGymError

#: Entry points of this group are commands too, see :func:`find_commands`.
GROUP = "vla_gym.commands"
EXIT_OK, EXIT_PROBLEM, EXIT_USAGE, EXIT_STOPPED = 0, 1, 2, 130
#: Prints a script for the shell.
COMPLETION = "--print-completion"
# Columns of a table that is written to a file or another program.
_PIPED_WIDTH = 160


@dataclass
class DoctorConfig:
    """Report what this machine has and how to mend what is missing.

    Looks at Python, packages, cache, asset packs, open files and off-screen OpenGL, then tries out
    imports, CUDA and physics. Exit status: 0, or 1 if something must be mended (warnings do not
    count).
    """

    quick: bool = False
    """Leave out what takes seconds: imports, CUDA, physics."""
    protocol: Literal["openvla", "openpi", "libero"] | None = None
    """Also play a known episode as this evaluation protocol has it, and compare what happens and
    what is seen: does a low success rate come from the environment?"""
    json: bool = False
    """Print the report as JSON."""


@dataclass
class TasksConfig:
    """List the tasks."""

    suite: str | None = None
    """Only this suite; default: all but LIBERO-PRO's variants (goal-swap, 10-lan, ...)."""
    json: bool = False
    """Print the list as JSON."""


def _doctor(arguments: Sequence[str]) -> int:
    """What this machine has, what is missing and how to mend it."""
    config = parse_options(DoctorConfig, arguments, "doctor")
    from vla_gym.cli.doctor import as_json, print_report, run_checks

    findings = run_checks(quick=config.quick, protocol=config.protocol)
    report = as_json(findings)
    if config.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        print_report(findings)
    return EXIT_OK if report["ok"] else EXIT_PROBLEM


def _assets(arguments: Sequence[str]) -> int:
    """The asset packs: status, verify, path."""
    from vla_gym.assets.command import AssetsConfig, run

    return run(parse_options(AssetsConfig, arguments, "assets"))


def _tasks(arguments: Sequence[str]) -> int:
    """The tasks: ids, instructions, objects, goals, step limits."""
    config = parse_options(TasksConfig, arguments, "tasks")
    from vla_gym.experts import EXPERT_TASKS
    from vla_gym.suites import VARIANTS, suite_names, suite_tasks

    every = [name for name in suite_names() if name not in VARIANTS]
    suites = every if config.suite is None else [config.suite]
    rows: list[dict[str, Any]] = [
        {
            "suite": task.suite,
            "task_id": task.task_id,
            "instruction": task.instruction,
            "objects": list(task.objects),
            "fixtures": list(task.fixtures),
            "goal": task.goal,
            "max_control_steps": task.max_control_steps,
            "expert": task.task_id in EXPERT_TASKS.get(task.suite, ()),
        }
        for suite in suites
        for task in suite_tasks(suite)
    ]
    if config.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return EXIT_OK
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, row_styles=["", "dim"])
    for heading in ("suite", "id"):
        table.add_column(heading, no_wrap=True)
    for heading in ("instruction", "objects", "goal"):
        table.add_column(heading, ratio=1, overflow="fold")
    for heading in ("step limit", "expert"):
        table.add_column(heading, min_width=max(map(len, heading.split())))
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("suite", "task_id", "instruction")),
            ", ".join(row["objects"]),
            row["goal"],
            str(row["max_control_steps"]),
            "yes" if row["expert"] else "no",
        )
    Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(table)
    return EXIT_OK


def _demos(arguments: Sequence[str]) -> int:
    """Record demonstrations of the scripted experts."""
    from vla_gym.demos.config import DemosConfig
    from vla_gym.demos.record import record_demos

    for path in record_demos(parse_options(DemosConfig, arguments, "demos")):
        sys.stdout.write(f"{path}\n")
    return EXIT_OK


def _bench(arguments: Sequence[str]) -> int:
    """Speed and memory beside LIBERO's and Gymnasium's vector environments; --vla: of a VLA."""
    if any(argument.partition("=")[0] == "--vla" for argument in arguments):
        from vla_gym.cli.bench.vla import VLABenchConfig
        from vla_gym.cli.bench.vla import main as main_vla

        return main_vla(parse_options(VLABenchConfig, arguments, "bench"))
    from vla_gym.cli.bench.config import BenchConfig

    config = parse_options(BenchConfig, arguments, "bench")
    from vla_gym.cli.bench.compare import main

    return main(config)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": _doctor,
    "assets": _assets,
    "tasks": _tasks,
    "demos": _demos,
    "bench": _bench,
}


def find_commands() -> dict[str, Callable[[Sequence[str]], int]]:
    """Return the commands by name: those of this package, and the entry points of other packages.

    An entry point of the group ``vla_gym.commands`` names a function from the arguments to the
    exit status; the first line of its docstring is its help.
    """
    others = {point.name: partial(_run_point, point) for point in entry_points(group=GROUP)}
    return {**COMMANDS, **others, **COMMANDS}  # ours first, and none of them replaced


def _run_point(point: EntryPoint, arguments: Sequence[str]) -> int:
    """Run another package's command, which is imported only now: one may be broken."""
    return int(_load(point)(arguments) or 0)


def _load(point: EntryPoint) -> Callable[[Sequence[str]], int | None]:
    try:
        return point.load()
    except Exception as error:  # whatever an import raises
        raise ConfigError(f"{point.name}: {point.value} cannot be imported: {error!r}") from error


def _help_of(function: Callable[[Sequence[str]], int]) -> str:
    if not isinstance(function, partial):
        return (function.__doc__ or "").partition("\n")[0]
    try:
        return (_load(function.args[0]).__doc__ or "").partition("\n")[0]
    except ConfigError as error:
        return str(error)


def usage() -> str:
    """Return the list of commands."""
    lines = ["usage: vla-gym COMMAND [options]", "", "commands:"]
    for name, function in find_commands().items():
        lines.append(f"  {name:<12}{_help_of(function)}")
    lines += ["", "Options of a command, with their defaults: vla-gym COMMAND --help"]
    lines += [f"Completion for bash and zsh: vla-gym {COMPLETION}", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``vla-gym``; see :func:`run_program`."""
    return run_program("vla-gym", find_commands(), usage, arguments)


def run_program(
    program: str,
    commands: Mapping[str, Callable[[Sequence[str]], int | None]],
    usage: Callable[[], str],
    arguments: Sequence[str] | None,
) -> int:
    """Run the command that a program's arguments name, or print what they ask about the program.

    Args:
        program: Its name, as it is typed.
        commands: Each takes the arguments after its name and returns its exit status; None is 0.
        usage: Returns the text of ``--help``.
        arguments: Without the program's name; default: the process's.

    Returns:
        Exit status: 0 done, 1 a problem was found or bench could measure nothing, 2 wrong
        usage or a mistake that the message explains, 130 stopped by Ctrl-C or SIGTERM.
    """
    outlive_readers()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return EXIT_OK if arguments else EXIT_USAGE
    command, rest = arguments[0], arguments[1:]
    if command == "--version":
        from vla_gym import __version__

        sys.stdout.write(f"{program} {__version__}\n")
        return EXIT_OK
    if command == COMPLETION:
        from vla_gym.cli.completion import completion_script

        sys.stdout.write(completion_script(program, commands))
        return EXIT_OK
    if command not in commands:
        sys.stderr.write(f"Unknown command {command!r}: expected {', '.join(commands)}.\n")
        return EXIT_USAGE
    return run_command(commands[command], rest)


def run_command(command: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Run a command; what the user can mend is one line on stderr in place of a traceback.

    That is an error of this package, a path that may not or cannot be used, a full disk.
    """
    try:
        return command(arguments) or EXIT_OK
    except KeyboardInterrupt as error:
        sys.stderr.write(f"\n{error or 'Stopped.'}\n")
        return EXIT_STOPPED
    except VlaGymError as error:
        sys.stderr.write(f"error: {error}\n")
    except (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        if error.filename is None:
            raise
        sys.stderr.write(
            f"error: {error.filename} may not be used ({error.strerror}): give another path, or "
            "have its owner let you read and write it.\n"
        )
    except Exception as error:
        if not is_disk_full(error):
            raise
        sys.stderr.write(f"error: {disk_full_advice(error)}\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
