"""tools/gpu_check.py on a CPU with tiny networks: all of it but the GPU."""

import json
import subprocess
import sys

import gpu_check as tool
import pytest
import torch

pytest.importorskip("peft")
#: Rows and what must be a positive number in each; forward's first row is the device's peaks.
WANTED = {
    "forward-eager": (3, ("ms", "network_ms", "chunks_per_s", "tflop", "bound_ms", "of_bound")),
    "grpo": (4, ("act_s", "update_s", "chunks_per_s", "grad_norm", "trained")),
    "td3": (1, ("features_ms", "update_s", "sample_ms", "critic_ms", "actor_ms")),
}


@pytest.mark.slow
def test_steps_that_start_programs_run(tmp_path):
    trained = (1, ("steps_per_s", "rollout_s", "learn_s"))
    wanted = {"render": (1, ("steps_per_s", "cpu_ms")), "tests": (1, ())}
    wanted |= {"train-td3": trained, "train-grpo": trained}
    command = [sys.executable, tool.__file__, "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--steps", *wanted], stdout=subprocess.PIPE, text=True)
    check(tmp_path, wanted, done.returncode, done.stdout)


def test_steps_that_compute_write_their_figures(tmp_path, monkeypatch, capsys):
    def run_here(check, step, *_):
        rows = list(tool.STEPS[step](check, step))
        return {"seconds": 0.0, "failed": None, "rows": json.loads(json.dumps(rows))}

    monkeypatch.setattr(tool, "run_child", run_here)
    status = tool.main(tool.Check(out=tmp_path, device="cpu", tiny=True, steps=tuple(WANTED)))
    check(tmp_path, WANTED, status, capsys.readouterr().out)


def check(folder, wanted, status, printed):
    assert status == 0, (folder / "gpu_check.log").read_text()[-2000:]
    report = json.loads((folder / "gpu_check.json").read_text())
    assert report["device"] == "cpu" and list(report["steps"]) == list(wanted)
    for step, (count, keys) in wanted.items():
        found = report["steps"][step]
        assert found["failed"] is None and len(found["rows"]) == count, step
        assert all(row[key] > 0 for row in found["rows"][-2 if count > 1 else -1 :] for key in keys)
        assert f"## {step}" in (folder / "gpu_check.md").read_text()
    assert printed == (folder / "gpu_check.md").read_text()


def test_what_cannot_run_is_said(tmp_path):
    with pytest.raises(SystemExit, match="Unknown steps nothing"):
        tool.main(tool.Check(device="cpu", steps=("nothing",)))
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="No CUDA device"):
            tool.main(tool.Check(out=tmp_path))
    assert tool.main(tool.Check(out=tmp_path, device="cpu", tiny=True, minutes=0.0)) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {step["failed"] for step in report["steps"].values()} == {"left out: no time was left"}
