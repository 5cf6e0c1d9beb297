"""Vector environments side by side in one run: speed, reset, start-up, memory."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.assets import resolve_asset_pack
from vla_gym.cli.bench.config import NAMES, BenchConfig, SystemSpec, system_specs
from vla_gym.cli.bench.processes import Child
from vla_gym.errors import BenchError
from vla_gym.suites import get_suite, get_task

#: A round lets a system play until this much time is measured: fast and slow get equal precision.
WINDOW_S = 1.0
#: Small enough that neither a task is solved nor the arm leaves its workspace between two resets.
_AMPLITUDE = 0.6
#: Figure -> heading.
_COLUMNS = {
    "steps_per_s": "control steps/s",
    "chunks_per_s": "chunks/s",
    "cpu_ms": "CPU ms a step",
    "reset_s": "reset, s",
    "start_s": "start, s",
    "worker_mb": "MB a worker",
    "all_mb": "MB in all",
}


def measure(config: BenchConfig) -> dict[str, Any]:
    """Measure every system and return the report; one that fails is named, the others go on.

    Raises:
        AssetError: If the asset pack is not there.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vla_gym.suites.libero import load_task_model

    pack = resolve_asset_pack(config.assets)
    specs = system_specs(config)
    failed: dict[str, str] = {}
    rounds: dict[str, list[dict[str, float]]] = {spec.name: [] for spec in specs}
    starts: dict[str, list[dict[str, float]]] = {spec.name: [] for spec in specs}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        # Scenes that the cache lacks are compiled once a machine; that is no part of a start.
        models = {
            task_id: load_task_model(get_task(config.suite, task_id), config.assets)
            for task_id in bar.track(config.task_ids, description="scenes")
        }
        states = {
            spec.name: [models[spec.task_of(i)].init_states for i in range(spec.num_envs)]
            for spec in specs
        }
        # Each system by itself: its start-up and its memory.
        for spec in bar.track(specs * config.starts, description="starts"):
            with _noting_failure(spec, failed), closing(Child(spec)) as child:
                _turn(child, config, states[spec.name], 0, 1e-9)
                starts[spec.name].append({"start_s": child.start_s, **child.memory()})
        # All of them alive, taking turns; the first round only warms up.
        with ExitStack() as stack:
            children: dict[str, Child] = {}
            turns = [(index, spec) for index in range(config.rounds + 1) for spec in specs]
            for index, spec in bar.track(turns, description="rounds"):
                if spec.name in failed:
                    continue
                with _noting_failure(spec, failed):
                    if index == 0:
                        children[spec.name] = stack.enter_context(closing(Child(spec)))
                    child = children[spec.name]
                    figures = _turn(child, config, states[spec.name], index, WINDOW_S)
                    if index > 0:
                        rounds[spec.name].append(figures)
                        speed = f"{figures['steps_per_s']:.1f} control steps/s"
                        bar.console.print(f"round {index}, {spec.name}: {speed}", markup=False)
                if spec.name in failed:
                    bar.console.print(f"{spec.name}: {failed[spec.name]}", markup=False)
                    if spec.name in children:
                        children[spec.name].close()  # one that hangs would disturb the others
    systems: dict[str, dict[str, Any]] = {}
    for spec in specs:
        if medians := _spreads(rounds[spec.name]):
            counts = {"num_envs": spec.num_envs, "workers": config.num_workers}
            systems[spec.name] = {**counts, **medians, **_spreads(starts[spec.name])}
    baseline = next((n for n in (NAMES["libero"], *reversed(list(systems))) if n in systems), None)
    ours = NAMES["ours"]

    def over(name: str, other: str) -> dict[str, dict[str, float]]:
        return ratios(rounds[name], rounds[other]) | ratios(starts[name], starts[other])

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "settings": {k: v for k, v in asdict(config).items() if k != "json"},
        "assets": {"pack": pack.name, "digest": pack.digest},
        "machine": machine(),
        "baseline": baseline,
        "systems": systems,
        "ratios": {} if baseline is None else {name: over(name, baseline) for name in systems},
        "ours_over": {n: over(ours, n) for n in systems if ours in systems and n != ours},
        "failed": failed,
    }


@contextmanager
def _noting_failure(spec: SystemSpec, failed: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except BenchError as error:
        failed[spec.name] = str(error)


def _turn(
    child: Child, config: BenchConfig, states: list[np.ndarray], index: int, window_s: float
) -> dict[str, float]:
    spec, suite = child.spec, get_suite(config.suite)
    state, steps = index % suite.num_init_states, config.chunks * config.chunk_len
    actions = fixed_actions(config.seed, spec.num_envs, steps, suite.action.size)
    own_states = [rows[state] for rows in states] if spec.system == "libero" else None
    return child.call("measure", state, own_states, actions, window_s)


def fixed_actions(seed: int, num_envs: int, steps: int, size: int) -> np.ndarray:
    """Return (num_envs, steps, size) float32; no environment's depend on the others."""
    rows = []
    for index in range(num_envs):
        rng = np.random.default_rng([seed, index])
        rows.append(rng.uniform(-_AMPLITUDE, _AMPLITUDE, (steps, size)))
    return np.stack(rows).astype(np.float32)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {key: _spread([row[key] for row in rows]) for key in (rows[0] if rows else ())}


def ratios(
    rows: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return each figure over the baseline's of the same round, as a spread over the rounds."""
    if not rows or not base:
        return {}
    found = {}
    for key in rows[0].keys() - {"ended"}:
        pairs = [(a[key], b[key]) for a, b in zip(rows, base, strict=False) if b[key] > 0]
        if pairs:
            found[key] = _spread([a / b for a, b in pairs])
    return found


def machine() -> dict[str, Any]:
    """Return processor, memory, OpenGL renderer, load and the versions that speed depends on."""
    from vla_gym.cli.doctor import check_gl, check_limits, check_packages

    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "limits": check_limits().value,
        "gl": check_gl().value,
        "load": os.getloadavg()[0],
        "packages": check_packages("").value,
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Print the figures of each system, then their ratios to the baseline's."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    titles = [("systems", "Medians of the rounds")]
    if report["settings"]["peers"] is not None:
        titles.append(("ours_over", "Ours as a ratio to each, medians of the same round"))
    elif report["baseline"] is not None:
        titles.append(("ratios", f"Ratios to {report['baseline']}, medians of the same round"))
    for part, title in titles:
        table = Table(title=title, title_justify="left", show_edge=False)
        table.add_column("system")
        for heading in _COLUMNS.values():
            table.add_column(heading, justify="right")
        for name, figures in report[part].items():
            cells = [_cell(figures.get(key)) for key in _COLUMNS]
            table.add_row(name, *cells)
        console.print(table)
    host = report["machine"]
    console.print(f"{host['cpu']}, {host['limits']}; OpenGL: {host['gl']}; load {host['load']:.1f}")
    console.print(f"Asset pack {report['assets']['pack']}; {report['date']}")
    for name, figures in report["systems"].items():
        if ended := figures["ended"]["high"]:
            console.print(f"{name}: {ended:.0f} episodes ended within a round.")
    for name, why in report["failed"].items():
        console.print(f"{name} failed: {why}", markup=False)


def _cell(summary: Mapping[str, float] | None) -> str:
    if summary is None:
        return "-"
    median = summary["median"]
    half = 50 * (summary["high"] - summary["low"]) / median if median else 0.0
    return f"{median:,.0f} ±{half:.0f}%" if abs(median) >= 100 else f"{median:.3g} ±{half:.0f}%"


def main(config: BenchConfig) -> int:
    """Measure, print, write; 1 if no system could be measured."""
    report = measure(config)
    print_report(report)
    if config.json is not None:
        config.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["systems"] else 1
