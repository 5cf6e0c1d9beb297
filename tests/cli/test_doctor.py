"""The doctor tells what is missing and how to mend it, and never raises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vla_gym.cli import doctor
from vla_gym.cli import main as cli
from vla_gym.cli.doctor import Check, children, graphics, probes, system
from vla_gym.cli.doctor.children import Answer

ROOT = Path(__file__).resolve().parents[2]
MESA = {"cuda": None, "file": None, "vendor": "Mesa Project", "works": True}
BROKEN = {"cuda": None, "file": "/dev/dri/card0", "vendor": None, "works": False}


def nvidia(cuda: int) -> dict:
    return {"cuda": cuda, "file": f"/dev/dri/card{cuda}", "vendor": "NVIDIA", "works": True}


def gl_answer(**changes) -> dict:
    return {"library": True, "devices": [MESA], "renderer": None, "error": "", **changes}


# --- packages and system --------------------------------------------------------------------------


def test_package_pins_are_checked(monkeypatch):
    versions = {"mujoco": "3.4.0", "numpy": "1.26.4"}
    monkeypatch.setattr(system.importlib.metadata, "version", versions.__getitem__)
    newer = system.check_package("mujoco", ">=3.3,<3.4")
    assert newer.status == "fail"
    assert newer.value == "3.4.0, expected >=3.3,<3.4"
    assert newer.mend.startswith("pip install 'mujoco>=3.3,<3.4'")
    assert "settle differently" in newer.mend
    assert system.check_package("numpy", "<2").status == "ok"


def test_missing_package():
    assert system.check_package("no-such-distribution", ">=1").status == "fail"
    optional = system.check_package("no-such-distribution", ">=1", required=False)
    assert (optional.status, "[trainers]" in optional.mend) == ("warn", True)


def test_python_version(monkeypatch):
    assert system.check_python().status == "ok"
    monkeypatch.setattr(system.sys, "version_info", (3, 13, 1))
    assert ">=3.11,<3.13" in system.check_python().mend


def test_missing_real_meshes_are_only_a_warning(monkeypatch, tmp_path):
    monkeypatch.delenv("VLA_GYM_LIBERO_ASSETS", raising=False)
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    check = system.check_assets("libero")
    assert check.status == "warn"
    assert "vla-gym assets download" in check.mend


def test_corrupt_weights_are_found(monkeypatch, tmp_path):
    from vla_gym.vla import files

    monkeypatch.setattr(files, "WEIGHTS_ROOT", tmp_path)
    assert system.check_weights("mini").status == "fail"  # absent
    for name in ("mini", "mini-rl-token"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("weights")
        files.write_checksums(tmp_path / name)
    assert system.check_weights("mini").status == "ok"
    (tmp_path / "mini-rl-token" / "model.safetensors").write_text("weighty")
    corrupt = system.check_weights("mini")
    assert corrupt.status == "fail"
    assert "model.safetensors" in corrupt.mend


def test_unusable_cache_folder(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VLA_GYM_CACHE", str(blocker / "cache"))
    check = system.check_cache()
    assert check.status == "fail"
    assert "export VLA_GYM_CACHE=" in check.mend


def test_cache_size_and_space(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    (tmp_path / "scenes").mkdir()
    with (tmp_path / "scenes" / "scene.mjb").open("wb") as file:
        file.truncate(30_000_000_000)  # sparse
    large = system.check_cache()
    assert large.status == "warn"
    assert large.mend.startswith(f"rm -r {tmp_path / 'scenes'}")
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(system.shutil, "disk_usage", lambda _: usage)
    assert "1 GB is needed" in system.check_cache().mend


def test_shared_memory(monkeypatch, tmp_path):
    assert "memfd works" in system.check_shared_memory().value
    assert system.check_shared_memory(tmp_path / "absent").status == "ok"
    tiny = shutil.disk_usage("/")._replace(total=64 * 2**20)
    monkeypatch.setattr(system.shutil, "disk_usage", lambda _: tiny)
    check = system.check_shared_memory()
    assert check.status == "warn"
    assert "--shm-size" in check.mend and "does not use" in check.mend

    def refused(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(system.os, "memfd_create", refused)
    assert system.check_shared_memory().status == "fail"


def test_open_files(monkeypatch):
    monkeypatch.setattr(system.resource, "getrlimit", lambda _: (64, 4096))
    check = system.check_files()
    assert (check.status, check.value, check.mend) == (
        "warn",
        "64 (at most 4096)",
        "ulimit -n 4096",
    )


# --- graphics -------------------------------------------------------------------------------------


def test_gl_renderer_string():
    check = doctor.check_gl()
    assert check.status in ("ok", "warn"), check
    assert "Mesa" in check.value or "NVIDIA" in check.value


@pytest.mark.parametrize("gpu", [False, True])
def test_software_renderer_is_a_warning(monkeypatch, gpu):
    monkeypatch.setattr(graphics, "has_gpu", lambda: gpu)
    monkeypatch.setattr(graphics, "in_container", lambda: True)
    check = graphics.judge_gl(gl_answer(renderer="llvmpipe (LLVM 15) | 4.5 Mesa"))
    assert check.status == "warn" and "in software" in check.value
    assert ("NVIDIA_DRIVER_CAPABILITIES=all" in check.mend) is gpu
    assert "take 21 ms" in graphics.with_cost(check, 21.4).value
    monkeypatch.setenv("LP_NUM_THREADS", "4")
    check = graphics.judge_gl(gl_answer(renderer="llvmpipe (LLVM 15) | 4.5 Mesa"))
    assert check.status == "warn" and "LP_NUM_THREADS=4" in check.value and "Unset" in check.mend
    real = graphics.judge_gl(gl_answer(renderer="NVIDIA H100/PCIe/SSE2 | 4.6"))
    assert real.status == "ok" and graphics.with_cost(real, 1.0) == real


def test_what_is_wrong_with_egl_is_told_apart(monkeypatch):
    monkeypatch.setattr(graphics.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(graphics, "has_gpu", lambda: False)
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    missing = graphics.judge_gl(gl_answer(library=False, error="libEGL.so.1: cannot open"))
    assert missing.value.startswith("libEGL is missing")
    assert missing.mend.endswith("apt-get install -y libegl1 libgl1-mesa-dri libgl1 libglib2.0-0")
    none = graphics.judge_gl(gl_answer(devices=[]))
    assert "no driver offers a device" in none.value and "libgl1-mesa-dri" in none.mend
    monkeypatch.setattr(graphics, "has_gpu", lambda: True)
    monkeypatch.setattr(graphics, "in_container", lambda: False)
    assert "libnvidia-gl" in graphics.judge_gl(gl_answer(devices=[])).mend
    monkeypatch.setattr(graphics, "_render_nodes", lambda: [Path("/dev/dri/renderD128")])
    monkeypatch.setattr(graphics.os, "access", lambda *_: False)
    locked = graphics.judge_gl(gl_answer(devices=[BROKEN], error="no display"))
    assert locked.status == "fail" and "usermod -aG render,video" in locked.mend


def test_wrong_egl_device_in_a_real_process(monkeypatch):
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "77")
    check = doctor.check_gl()
    assert check.status == "fail"
    assert "MUJOCO_EGL_DEVICE_ID=77 does not work" in check.value
    assert check.mend.startswith("Unset it, or choose from: 0 (")


def test_hanging_driver_is_reported(monkeypatch, tmp_path):
    program = tmp_path / "hang.py"
    program.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(graphics, "_PROGRAM", program)
    started = time.monotonic()
    check = doctor.check_gl(timeout=0.3)
    assert check.status == "fail" and "no answer within" in check.value
    assert time.monotonic() - started < 10
    program.write_text("import os; os.abort()")
    assert "SIGABRT" in doctor.check_gl().value


def test_cuda_against_egl_devices(monkeypatch):
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setattr(graphics, "in_container", lambda: True)
    two = ["A100", "A100"]
    good = graphics.judge_cuda(two, [nvidia(1), nvidia(0), MESA])
    assert good.status == "ok"
    assert "EGL 1 = GPU 0, EGL 0 = GPU 1" in good.value and "MUJOCO_EGL_DEVICE_ID" in good.value
    mesa_first = graphics.judge_cuda(["A100"], [MESA, nvidia(0)])
    assert mesa_first.status == "warn"
    assert mesa_first.mend.endswith("export MUJOCO_EGL_DEVICE_ID=1")
    none = graphics.judge_cuda(["A100"], [MESA])
    assert none.status == "warn" and "NVIDIA_DRIVER_CAPABILITIES" in none.mend
    assert graphics.check_cuda_and_egl({"cuda": []}).status == "ok"


# --- probes ---------------------------------------------------------------------------------------


def imports(**changes) -> Answer:
    fine = {"version": "1.0", "error": None}
    return Answer(
        {"torch": fine, "torchvision": {**fine, "version": None}, "transformers": fine, "cuda": []}
        | changes
    )


def test_import_health():
    assert probes.check_imports(imports()).status == "ok"
    error = {"version": None, "error": "RuntimeError: operator torchvision::nms does not exist"}
    only_vision = probes.check_imports(imports(torchvision=error))
    assert only_vision.status == "warn" and "pip uninstall -y torchvision" in only_vision.mend
    both = probes.check_imports(imports(torchvision=error, transformers=error))
    assert both.status == "fail" and "pip uninstall -y torchvision" in both.mend
    assert probes.check_imports(imports(torch=error)).status == "fail"
    assert "force-reinstall" in probes.check_imports(Answer(None, "killed by SIGSEGV")).mend


def test_a_torchvision_that_does_not_fit_in_a_real_process(monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = probes.check_imports(probes.ask_imports())
    assert check.status in ("warn", "fail")
    assert "torchvision::nms" in check.value and "pip uninstall -y torchvision" in check.mend


@pytest.mark.parametrize(
    ("pack", "cm", "status"),
    [("libero", 1.46, "ok"), ("libero", 3.69, "fail"), ("lite", 0.0, "ok"), ("lite", 2.0, "fail")],
)
def test_settling_is_judged(pack, cm, status):
    check = probes.check_settle(Answer({"pack": pack, "cm": cm, "mujoco": "3.8.1"}))
    assert check.status == status
    assert ("mujoco>=3.3,<3.4" in check.mend) is (status == "fail")


def test_settle_probe_on_the_lite_pack():
    answer = probes.ask_simulation("settle", "lite")
    assert answer.data is not None, answer.trouble
    assert answer.data["cm"] < 0.01
    assert probes.check_settle(answer).status == "ok"


@pytest.mark.libero_assets
def test_settle_probe_on_the_real_meshes(libero_assets_dir):
    answer = probes.ask_simulation("settle", str(libero_assets_dir))
    assert answer.data is not None, answer.trouble
    assert answer.data["cm"] == pytest.approx(1.46, abs=0.01)


def test_speed_probe():
    answer = probes.ask_simulation("speed", "lite")
    assert answer.data is not None, answer.trouble
    assert answer.data["states"] > answer.data["images"] > 0
    slow = probes.check_speed(Answer({**answer.data, "images": 2.0, "states": 100.0}), "llvmpipe")
    assert slow.status == "warn" and "llvmpipe" in slow.mend
    fast = probes.check_speed(Answer({**answer.data, "images": 50.0, "states": 100.0}))
    assert fast.status == "ok" and "10.0 ms" in fast.value


def test_probes_that_fail_say_why(tmp_path):
    answer = probes.ask_simulation("settle", str(tmp_path))
    assert answer.data is None and "complete asset folder" in answer.trouble
    assert probes.check_settle(answer).status == probes.check_speed(answer).status == "fail"
    assert children.ask(["-c", "print('no json')"], 30).trouble == "exit code 0"
    assert children.ask(["-c", "raise SystemExit('why')"], 30).trouble == "why"


# --- the report -----------------------------------------------------------------------------------


def test_a_broken_check_is_reported_not_raised(monkeypatch):
    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(system, "check_cores", broken)
    monkeypatch.setattr(graphics, "check_gl", broken)
    checks = {check.name: check for check in doctor.run_checks(quick=True)}
    for name in ("gl", "cores"):
        assert (checks[name].status, checks[name].value) == ("fail", "RuntimeError: boom")


def test_full_run_puts_the_pieces_together(monkeypatch):
    monkeypatch.setattr(probes, "ask_imports", lambda: imports())
    rates = {"pack": "lite", "images": 25.0, "states": 100.0, "cores": 2}
    settled = {"pack": "lite", "cm": 0.0, "mujoco": "3.3.7"}
    answers = {"speed": Answer(rates), "settle": Answer(settled)}
    monkeypatch.setattr(probes, "ask_simulation", lambda probe, _: answers[probe])
    monkeypatch.setattr(graphics, "check_gl", lambda: Check("gl", "warn", "llvmpipe"))
    checks = {check.name: check for check in doctor.run_checks()}
    assert list(checks)[-4:] == ["imports", "cuda", "settle", "speed"]
    assert checks["gl"].value == "llvmpipe; two 128x128 images take 30 ms"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(monkeypatch, capsys, status, code):
    monkeypatch.setattr(
        doctor, "run_checks", lambda quick: [Check("gl", status, f"x {quick}", "mend it")]
    )
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    expected = {"name": "gl", "status": status, "value": "x False", "mend": "mend it"}
    assert report["checks"] == [expected]
    assert cli.main(["doctor", "--quick"]) == code
    text = capsys.readouterr().out
    assert "mend it" in text and "x True" in text
    assert ("works here" in text) is (code == 0)


@pytest.mark.slow
def test_whole_run_takes_less_than_40_seconds():
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "vla_gym.cli.main", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = json.loads(run.stdout)
    assert (run.returncode == 0) is report["ok"], run.stdout
    assert time.monotonic() - started < 40


def test_pins_are_those_of_the_package():
    """The doctor's table repeats pyproject.toml: they must not drift apart."""
    import tomllib

    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    declared = {
        requirement.name: requirement.specifier
        for line in project["dependencies"] + project["optional-dependencies"]["trainers"]
        for requirement in [Requirement(line)]
    }
    for name, specifier in {**system.REQUIREMENTS, **system.OPTIONAL}.items():
        if name != "robosuite":  # comes with rlinf-libero
            assert declared[name] == specifier, name
    low, high = (".".join(map(str, version)) for version in system.PYTHONS)
    assert project["requires-python"] == f">={low},<{high}"
