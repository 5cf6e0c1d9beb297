"""The whole of ``vla-gym bench``: measure, show, write."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from vla_gym.cli.bench.actions import FixedActions
from vla_gym.cli.bench.config import BenchConfig
from vla_gym.cli.bench.measure import Measurement
from vla_gym.cli.bench.plan import scenarios
from vla_gym.cli.bench.report import (
    FORMAT,
    load_report,
    print_conditions,
    print_tables,
    write_page,
)
from vla_gym.cli.bench.spec import NO_ASSETS, Scenario
from vla_gym.cli.bench.tables import scenario_tables, target_tables
from vla_gym.errors import AssetError, ConfigError

#: Called after each scenario with the report so far and that scenario's part.
Done = Callable[[dict[str, Any], dict[str, Any]], None]
# Where things are read from and written to; not part of what was measured.
_FILE_OPTIONS = ("json", "show", "page")


def run_bench(config: BenchConfig) -> dict[str, Any]:
    """Measure, or read a report; print it, and write what was asked for.

    Each part is printed, and the JSON file written, as soon as it is measured.

    Returns:
        The report.

    Raises:
        VlaGymError: If an option does not fit or nothing could be measured.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, when all child processes are gone.
    """
    from rich.console import Console

    # Checked before minutes of measuring are lost.
    for path in (config.json, config.page):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist.")
    console = Console()

    def done(report: dict[str, Any], scenario: dict[str, Any]) -> None:
        print_tables(scenario_tables(scenario), console)
        _write_json(report, config)

    if config.show is None:
        report = measure(config, done)
    else:
        report = load_report(config.show)
        for scenario in report["scenarios"]:
            print_tables(scenario_tables(scenario), console)
    print_tables(target_tables(report), console)
    print_conditions(report, console)
    _write_json(report, config)
    if config.page is not None:
        write_page(report, config.page)
    return report


def _write_json(report: dict[str, Any], config: BenchConfig) -> None:
    if config.json is not None:
        config.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(config: BenchConfig, done: Done = lambda *_: None) -> dict[str, Any]:
    """Measure every scenario that the options stand for and return the report.

    Args:
        config: The options.
        done: Called after each scenario with the report so far and the scenario's part of it.

    Raises:
        AssetError: If no scenario's asset pack is there.
    """
    from vla_gym.cli.bench.machine import machine, today, versions

    notes: list[str] = []
    packs, absent = _find_packs(config, notes)
    wanted = scenarios(config, "libero" if "libero" in packs else "lite")
    plan = [_without(scenario, absent, notes) for scenario in wanted]
    plan = [scenario for scenario in plan if scenario.contenders]
    if not plan:
        raise AssetError("\n".join(absent.values()) or "Nothing is left to be measured.")
    _compile(plan)
    used = {c.env.assets for s in plan for c in s.contenders}
    begin = time.perf_counter()
    report: dict[str, Any] = {
        "format": FORMAT,
        "date": today(),
        "command": _command(config),
        "seconds": 0.0,
        "complete": False,
        "versions": versions(),
        "machine": machine(),
        "threads": config.thread_environment(),
        "assets": {name: digest for name, digest in packs.items() if name in used},
        "settings": {
            k: v for k, v in asdict(config).items() if k not in (*_FILE_OPTIONS, "actions")
        },
        "notes": notes,
        "scenarios": [],
    }
    actions = FixedActions(config.seed, config.actions)
    report["actions"] = {"source": actions.source, "sha256": actions.sha256}
    measurement = Measurement(config.rounds, actions, config.thread_environment())
    with _terminable():
        for number, scenario in enumerate(plan, 1):
            with _progress(measurement.count_of(scenario)) as advance:
                report["scenarios"].append(measurement.run(scenario, advance))
            report["seconds"] = time.perf_counter() - begin
            report["complete"] = number == len(plan)
            done(report, report["scenarios"][-1])
    return report


def _find_packs(config: BenchConfig, notes: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digests of the packs that are here, and why others are not."""
    from vla_gym.assets import resolve_asset_pack

    names = ["lite", "libero"]
    if config.assets is not None and config.preset is None:
        names = [config.assets]
    elif config.preset == "quick":
        names = ["lite"]
    packs, absent = {}, {}
    for name in names:
        try:
            packs[name] = resolve_asset_pack(name).digest
        except AssetError as error:
            absent[name] = str(error)
    if absent and packs:
        notes += [f"Not measured, since it is not on this machine: {m}" for m in absent.values()]
    return packs, absent


def _compile(plan: list[Scenario]) -> None:
    """Compile scenes that the cache lacks: once a machine, and not what starting up costs."""
    from vla_gym.suites import get_task
    from vla_gym.suites.libero import load_task_model

    specs = {c.env for scenario in plan for c in scenario.contenders}
    wanted = sorted(
        {(s.suite, i, s.assets) for s in specs if s.assets != NO_ASSETS for i in s.task_ids}
    )
    with _progress(len(wanted)) as advance:
        for suite, task_id, assets in wanted:
            advance(f"scene of {suite} task {task_id}, {assets} pack")
            load_task_model(get_task(suite, task_id), assets)


def _without(scenario: Scenario, absent: dict[str, str], notes: list[str]) -> Scenario:
    """Return a scenario without the contenders whose pack is absent; on lite if that is all."""
    from dataclasses import replace

    kept = tuple(c for c in scenario.contenders if c.env.assets not in absent)
    if not kept and scenario.contenders and scenario.contenders[0].env.image_size == 0:
        notes.append(f"{scenario.key}: on the lite pack instead.")
        moved = [replace(c, env=replace(c.env, assets="lite")) for c in scenario.contenders]
        title = scenario.title.replace("libero pack", "lite pack")
        return replace(scenario, title=title, contenders=tuple(moved))
    return replace(scenario, contenders=kept)


def _command(config: BenchConfig) -> str:
    """Return the command line that measures the same again."""
    default = BenchConfig()
    words = ["vla-gym bench"]
    for name, value in asdict(config).items():
        if value == getattr(default, name) or name in _FILE_OPTIONS:
            continue
        option = "--" + name.replace("_", "-")
        values = value if isinstance(value, tuple | list) else (value,)
        words += [option] if value is True else [option, *map(str, values)]
    return " ".join(words)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr; yields what says that the next thing begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def advance(text: str) -> None:
            nonlocal begun
            bar.update(task, advance=int(begun), description=text)
            begun = True

        yield advance


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the child processes too, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(config: BenchConfig) -> int:
    """Run the command; 130 after an interruption, as shells have it."""
    try:
        run_bench(config)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; all processes of the benchmark have ended.\n")
        return 130
    return 0
