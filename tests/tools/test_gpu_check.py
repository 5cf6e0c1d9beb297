"""tools/gpu_check.py on a CPU with tiny networks: all of it but the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
TOOL = Path(__file__).parents[2] / "tools" / "gpu_check.py"
#: Rows and what must be a positive number in each; forward's first row is the device's peaks.
WANTED = {
    "forward-eager": (3, ("ms", "network_ms", "chunks_per_s", "tflop", "bound_ms", "of_bound")),
    "grpo": (4, ("act_s", "update_s", "chunks_per_s", "grad_norm", "trained")),
    "td3": (1, ("features_ms", "update_s", "gradient_steps")),
}


def run(*arguments):
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_steps_that_start_programs_run(tmp_path):
    trained = (1, ("steps_per_s", "rollout_s", "learn_s"))
    wanted = {"render": (1, ("steps_per_s", "cpu_ms")), "tests": (1, ())}
    check(tmp_path, wanted | {"train-td3": trained, "train-grpo": trained})


def test_steps_that_compute_write_their_figures(tmp_path):
    check(tmp_path, WANTED)


def check(folder, wanted):
    done = run("--device", "cpu", "--tiny", "--out", str(folder), "--steps", *wanted)
    log = (folder / "gpu_check.log").read_text()
    assert done.returncode == 0, done.stderr + log[-2000:]
    report = json.loads((folder / "gpu_check.json").read_text())
    assert report["device"] == "cpu" and list(report["steps"]) == list(wanted)
    for step, (count, keys) in wanted.items():
        found = report["steps"][step]
        assert found["failed"] is None and len(found["rows"]) == count, step
        assert all(row[key] > 0 for row in found["rows"][-2 if count > 1 else -1 :] for key in keys)
        assert f"## {step}" in (folder / "gpu_check.md").read_text()
    assert done.stdout == (folder / "gpu_check.md").read_text()


def test_what_cannot_run_is_said(tmp_path):
    assert "Unknown steps nothing" in run("--device", "cpu", "--steps", "nothing").stderr
    if not torch.cuda.is_available():
        assert "No CUDA device" in run("--out", str(tmp_path)).stderr
    late = run("--device", "cpu", "--tiny", "--out", str(tmp_path), "--minutes", "0")
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert late.returncode == 1
    assert {step["failed"] for step in report["steps"].values()} == {"left out: no time was left"}
