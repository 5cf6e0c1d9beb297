"""``vla-gym doctor | tasks | play | ...``; each command imports what it needs itself."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any, TypeVar

from vla_gym.disk_full import disk_full_advice, is_disk_full
from vla_gym.errors import ConfigError, VlaGymError

USAGE = """usage: vla-gym COMMAND [options]

commands:
  doctor      what this machine has, what is missing and how to mend it
  assets      the asset packs: status, download, verify, path
  tasks       the tasks: ids, instructions, objects, goals, step limits
  play        a video of the expert, the VLA, random actions or a trained policy, tiled
  demos       record demonstrations of the scripted experts
  eval        success rates of the VLA, a trained policy, the experts on the official initial states
  eval-merge  put the result cards of shards together
  report      one HTML page about training runs and result cards
  bench       speed, start-up and memory beside LIBERO's and Gymnasium's vector environments;
              with --vla NAME[:PATH]: chunks/s of a VLA (vla-gym bench --vla mini --help)

Options of a command, with their defaults: vla-gym COMMAND --help
"""

Config = TypeVar("Config")

EXIT_OK, EXIT_PROBLEM, EXIT_USAGE, EXIT_STOPPED = 0, 1, 2, 130
# Columns of a table that is written to a file or another program.
_PIPED_WIDTH = 160


@dataclass
class DoctorConfig:
    """Report what this machine has and how to mend what is missing.

    Looks at Python, packages, off-screen OpenGL, CUDA, asset packs, cache, shared memory and open
    files, then tries out imports, physics and speed. Exit status: 0, or 1 if something must be
    mended (warnings do not count).
    """

    quick: bool = False
    """Leave out what takes seconds: imports, CUDA, physics, speed."""
    json: bool = False
    """Print the report as JSON."""


@dataclass
class TasksConfig:
    """List the tasks."""

    suite: str | None = None
    """Only this suite; default: all."""
    json: bool = False
    """Print the list as JSON."""


def _doctor(arguments: Sequence[str]) -> int:
    config = _parse(DoctorConfig, arguments, "doctor")
    from vla_gym.cli.doctor import as_json, print_report, run_checks

    checks = run_checks(quick=config.quick)
    report = as_json(checks)
    if config.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        print_report(checks)
    return EXIT_OK if report["ok"] else EXIT_PROBLEM


def _assets(arguments: Sequence[str]) -> int:
    from vla_gym.assets.command import AssetsConfig, run

    return run(_parse(AssetsConfig, arguments, "assets"))


def _tasks(arguments: Sequence[str]) -> int:
    config = _parse(TasksConfig, arguments, "tasks")
    from vla_gym.experts import EXPERT_TASKS
    from vla_gym.suites import SUITES, suite_tasks

    suites = SUITES if config.suite is None else (config.suite,)
    rows: list[dict[str, Any]] = [
        {
            "suite": task.suite,
            "task_id": task.task_id,
            "instruction": task.instruction,
            "objects": list(task.objects),
            "fixtures": [name for name, _ in task.problem.fixtures],
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


def _play(arguments: Sequence[str]) -> int:
    from vla_gym.play.command import main
    from vla_gym.play.config import PlayConfig

    return main(_parse(PlayConfig, arguments, "play"))


def _demos(arguments: Sequence[str]) -> int:
    from vla_gym.demos.config import DemosConfig
    from vla_gym.demos.record import record_demos

    for path in record_demos(_parse(DemosConfig, arguments, "demos")):
        sys.stdout.write(f"{path}\n")
    return EXIT_OK


def _eval(arguments: Sequence[str]) -> int:
    from vla_gym_trainers.evaluation.config import EvalConfig

    config = _parse(EvalConfig, arguments, "eval")
    if config.policy not in ("vla", "expert", "random"):
        _import_sb3()
    from vla_gym_trainers.evaluation.command import main

    return main(config)


def _eval_merge(arguments: Sequence[str]) -> int:
    from vla_gym_trainers.evaluation.config import MergeConfig
    from vla_gym_trainers.evaluation.merging import main_merge

    return main_merge(_parse(MergeConfig, arguments, "eval-merge"))


def _report(arguments: Sequence[str]) -> int:
    from vla_gym_trainers.report.config import ReportConfig

    config = _parse(ReportConfig, arguments, "report")
    from vla_gym_trainers.report.command import main

    return main(config)


def _bench(arguments: Sequence[str]) -> int:
    if any(argument.partition("=")[0] == "--vla" for argument in arguments):
        from vla_gym.cli.bench.vla import VLABenchConfig
        from vla_gym.cli.bench.vla import main as main_vla

        return main_vla(_parse(VLABenchConfig, arguments, "bench"))
    from vla_gym.cli.bench import BenchConfig

    config = _parse(BenchConfig, arguments, "bench")
    from vla_gym.cli.bench.run import main

    return main(config)


def _import_sb3() -> None:
    """Import stable-baselines3 without the banner of the old ``gym`` that it picks up.

    Raises:
        ConfigError: If the trainers' extra is not installed.
    """
    try:
        with redirect_stderr(StringIO()):
            import stable_baselines3  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"This command needs the trainers ({error}): pip install 'vla-gym[trainers]'"
        ) from error


def _parse(config_class: type[Config], arguments: Sequence[str], command: str) -> Config:
    import tyro

    return tyro.cli(
        config_class,
        args=list(arguments),
        prog=f"vla-gym {command}",
        description=inspect.cleandoc(config_class.__doc__ or ""),
    )


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": _doctor,
    "assets": _assets,
    "tasks": _tasks,
    "play": _play,
    "demos": _demos,
    "eval": _eval,
    "eval-merge": _eval_merge,
    "report": _report,
    "bench": _bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Without the program's name; default: the process's.

    Returns:
        Exit status: 0 done, 1 the doctor found a problem, 2 wrong usage or a mistake that the
        message explains, 130 stopped.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return EXIT_OK if arguments else EXIT_USAGE
    command, rest = arguments[0], arguments[1:]
    if command == "--version":
        from vla_gym import __version__

        sys.stdout.write(f"vla-gym {__version__}\n")
        return EXIT_OK
    if command not in COMMANDS:
        sys.stderr.write(f"Unknown command {command!r}: expected {', '.join(COMMANDS)}.\n\n{USAGE}")
        return EXIT_USAGE
    return run_command(COMMANDS[command], rest)


def run_command(command: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Run a command; what the user can mend is one line on stderr in place of a traceback.

    Args:
        command: Takes its arguments; returns an exit status, None for 0.
        arguments: Of the command.

    Returns:
        The command's own status; 2 for an error of this package or a full disk, 130 after Ctrl-C
        or SIGTERM.
    """
    try:
        return command(arguments) or EXIT_OK
    except KeyboardInterrupt as error:
        sys.stderr.write(f"\n{error or 'Stopped.'}\n")
        return EXIT_STOPPED
    except VlaGymError as error:
        sys.stderr.write(f"error: {error}\n")
    except Exception as error:
        if not is_disk_full(error):
            raise
        sys.stderr.write(f"error: {disk_full_advice(error)}\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
