"""What needs a GPU, as much as 9 minutes hold: see docs/gpu.md and tools/gpu_check.sh.

``--device cpu --tiny`` does the same with tiny networks, so that this file is tested without one.
Each step is a process: its peak of memory is its own, and one that fails or takes too long costs
its own figures alone. A child writes a figure as a line of JSON as soon as it has it.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from gpu_steps import STEPS, Device, Row
from page_blocks import markdown_table

ROOT = Path(__file__).parents[1]
#: Steps in order, and the most seconds that each may take: what is most wanted comes first.
LIMITS = {
    "forward-eager": 80,
    "grpo": 110,
    "td3": 60,
    "render": 120,
    "train-td3": 120,
    "train-grpo": 120,
    "tests": 120,
    "forward-graphs": 180,
    "forward-compiled": 180,
}


@dataclass(frozen=True, kw_only=True)
class Check(Device):
    """Measure on one device what needs a GPU; writes gpu_check.json and gpu_check.md."""

    out: Path = ROOT / "gpu_check"
    """Folder of the results."""
    steps: tuple[str, ...] = tuple(LIMITS)
    """Steps to run."""
    minutes: float = 9.0
    """Steps that have not ended by then are stopped or left out."""
    child: str | None = None
    """Used by the script itself: run this step in this process."""


def run_child(check: Check, step: str, log: Any, limit_s: float) -> Row:
    """Run one step in a process of its own; returns its rows, seconds and what went wrong."""
    command = [sys.executable, __file__, "--child", step, "--device", check.device]
    command += ["--tiny"] if check.tiny else []
    # This checkout, whatever is installed.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.getenv("PYTHONPATH", "")])}
    begin, failed = time.perf_counter(), None
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=log, env=env, start_new_session=True
        )
        try:
            if child.wait(timeout=limit_s):
                failed = f"exit code {child.returncode}, see gpu_check.log"
        except subprocess.TimeoutExpired:
            failed = f"stopped after {limit_s:.0f} s"
        finally:
            if child.poll() is None:  # its own children too
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        rows = [json.loads(line) for line in output if line.startswith("{")]
    return {"seconds": time.perf_counter() - begin, "failed": failed, "rows": rows}


def markdown(report: Row) -> str:
    """Return one table a step."""
    lines = [f"# GPU check: {report['device']}, {report['date']}, torch {report['torch']}"]
    for step, found in report["steps"].items():
        lines += ["", f"## {step} ({found['seconds']:.0f} s)"]
        lines += ["", found["failed"]] if found["failed"] else []
        by_keys: dict[tuple[str, ...], list[Row]] = {}
        for row in found["rows"]:
            by_keys.setdefault(tuple(row), []).append(row)
        for keys, rows in by_keys.items():
            cells = [
                [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
                for row in rows
            ]
            lines += ["", *markdown_table(keys, cells)]
    return "\n".join(lines) + "\n"


def main(check: Check) -> int:
    """Run the steps; returns 1 if one failed."""
    if unknown := [step for step in check.steps if step not in STEPS]:
        raise SystemExit(f"Unknown steps {', '.join(unknown)}: there are {', '.join(STEPS)}.")
    if check.on_gpu and not torch.cuda.is_available():
        raise SystemExit("No CUDA device: torch.cuda.is_available() is False. See docs/gpu.md.")
    if check.child is not None:
        if check.tiny:
            torch.set_num_threads(1)  # tiny networks gain nothing from more
        for row in STEPS[check.child](check, check.child):
            print(json.dumps(row), flush=True)  # noqa: T201
        return 0
    check.out.mkdir(parents=True, exist_ok=True)
    report: Row = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(check.device) if check.on_gpu else "cpu",
        "torch": torch.__version__,
        "tiny": check.tiny,
        "steps": {},
    }
    deadline = time.perf_counter() + 60 * check.minutes
    with (check.out / "gpu_check.log").open("w") as log:
        for step in check.steps:
            limit = min(LIMITS[step], deadline - time.perf_counter())
            if limit < 5:
                found: Row = {"seconds": 0.0, "failed": "left out: no time was left", "rows": []}
            else:
                sys.stderr.write(f"{step} ...\n")
                found = run_child(check, step, log, limit)
            report["steps"][step] = found
            (check.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
            (check.out / "gpu_check.md").write_text(markdown(report))
    sys.stdout.write(markdown(report))
    return int(any(found["failed"] for found in report["steps"].values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Check, description=__doc__)))
