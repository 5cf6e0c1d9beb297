"""The doctor tells what is missing and how to mend it, and never raises."""

from __future__ import annotations

import json
import os
import shutil
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from vla_gym.cli import doctor
from vla_gym.cli import main as cli
from vla_gym.cli.doctor import asking, system, tried
from vla_gym.cli.doctor.asking import Answer, ask

ROOT = Path(__file__).resolve().parents[2]
MESA = {"cuda": None, "file": None, "vendor": "Mesa Project", "works": True}
BROKEN = {"cuda": None, "file": "/dev/dri/card0", "vendor": None, "works": False}
FINE = {"version": "1.0", "error": None}
IMPORTS = {"torch": FINE, "torchvision": {**FINE, "version": None}, "transformers": FINE}


def nvidia(cuda: int) -> dict:
    return {"cuda": cuda, "file": f"/dev/dri/card{cuda}", "vendor": "NVIDIA", "works": True}


def says(**answers: Any):
    """Return probes that say these things; a text is why there is no answer."""

    def answer(probe: str, *_: str) -> Answer:
        found = answers[probe]
        return Answer(None, found) if isinstance(found, str) else Answer(found)

    return answer


def gl(**changes: Any):
    return says(gl={"library": True, "devices": [MESA], "renderer": None, "error": "", **changes})


# --- packages and system --------------------------------------------------------------------------


def test_packages_are_checked_against_what_the_package_declares(monkeypatch):
    assert system.check_packages(None, ask).status == "ok"
    versions = {"mujoco": "3.4.0", "numpy": "1.26.4"}
    declared = ["mujoco<3.4,>=3.3", "numpy<2", "torch>=2.5", 'tensorboard>=2; extra == "trainers"']
    monkeypatch.setattr(system.importlib.metadata, "requires", lambda _: declared)

    def version(name):
        try:
            return versions[name]
        except KeyError as error:
            raise system.importlib.metadata.PackageNotFoundError(name) from error

    monkeypatch.setattr(system.importlib.metadata, "version", version)
    found = system.check_packages(None, ask)
    assert found.status == "fail"
    assert found.value == "mujoco 3.4.0, expected <3.4,>=3.3; torch is not installed"
    assert found.mend.startswith("pip install 'mujoco<3.4,>=3.3'")
    assert "settle differently" in found.mend and "pip install 'torch>=2.5'" in found.mend
    extra = system.check_packages("trainers", ask)
    assert (extra.status, extra.value) == ("warn", "tensorboard is not installed")
    assert "[trainers]" in extra.mend


def test_python_version(monkeypatch):
    assert system.check_python(ask).status == "ok"
    monkeypatch.setattr(system.sys, "version_info", (3, 13, 1))
    assert ">=3.11,<3.13" in system.check_python(ask).mend
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = (".".join(map(str, version)) for version in system.PYTHONS)
    assert project["requires-python"] == f">={low},<{high}"


def test_missing_real_meshes_are_only_a_warning(monkeypatch, tmp_path):
    monkeypatch.delenv("VLA_GYM_LIBERO_ASSETS", raising=False)
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    found = system.check_assets("libero", ask)
    assert found.status == "warn" and "vla-gym assets download" in found.mend


def test_corrupt_weights_are_found(monkeypatch, tmp_path):
    from vla_gym.vla import files

    monkeypatch.setattr(files, "WEIGHTS_ROOT", tmp_path)
    assert system.check_weights("mini", ask).status == "fail"  # absent
    for name in ("mini", "mini-rl-token"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("weights")
        files.write_checksums(tmp_path / name)
    assert system.check_weights("mini", ask).status == "ok"
    (tmp_path / "mini-rl-token" / "model.safetensors").write_text("weighty")
    corrupt = system.check_weights("mini", ask)
    assert corrupt.status == "fail" and "model.safetensors" in corrupt.mend


def test_cache_folder(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VLA_GYM_CACHE", str(blocker / "cache"))
    found = system.check_cache(ask)
    assert found.status == "fail" and "export VLA_GYM_CACHE=" in found.mend
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    (tmp_path / "scenes").mkdir()
    with (tmp_path / "scenes" / "scene.mjb").open("wb") as file:
        file.truncate(30_000_000_000)  # sparse
    large = system.check_cache(ask)
    assert large.status == "warn" and large.mend.startswith(f"rm -r {tmp_path / 'scenes'}")
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(system.shutil, "disk_usage", lambda _: usage)
    assert "1 GB is needed" in system.check_cache(ask).mend


def test_shared_memory_and_limits(monkeypatch, tmp_path):
    assert "memfd works" in system.check_shared_memory(ask).value
    assert system.check_shared_memory(ask, tmp_path / "absent").status == "ok"
    tiny = shutil.disk_usage("/")._replace(total=64 * 2**20)
    monkeypatch.setattr(system.shutil, "disk_usage", lambda _: tiny)
    found = system.check_shared_memory(ask)
    assert found.status == "warn" and "--shm-size" in found.mend and "does not use" in found.mend

    def refused(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(system.os, "memfd_create", refused)
    assert system.check_shared_memory(ask).status == "fail"
    monkeypatch.setattr(system.resource, "getrlimit", lambda _: (64, 4096))
    assert system.check_limits(ask).mend == "ulimit -n 4096"


# --- graphics -------------------------------------------------------------------------------------


def test_gl_in_a_real_process(monkeypatch):
    found = tried.check_gl(ask)
    assert found.status in ("ok", "warn") and ("Mesa" in found.value or "NVIDIA" in found.value)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "77")
    found = tried.check_gl(ask)
    assert found.status == "fail"
    assert "MUJOCO_EGL_DEVICE_ID=77 does not work" in found.value
    assert found.mend.startswith("Unset it, or choose from: 0 (")


@pytest.mark.parametrize("gpu", [False, True])
def test_software_renderer_is_a_warning(monkeypatch, gpu):
    monkeypatch.setattr(tried, "has_gpu", lambda: gpu)
    monkeypatch.setattr(tried, "in_container", lambda: True)
    found = tried.check_gl(gl(renderer="llvmpipe (LLVM 15) | 4.5 Mesa"))
    assert found.status == "warn" and "in software" in found.value
    assert ("NVIDIA_DRIVER_CAPABILITIES=all" in found.mend) is gpu
    monkeypatch.setenv("LP_NUM_THREADS", "4")
    found = tried.check_gl(gl(renderer="llvmpipe (LLVM 15) | 4.5 Mesa"))
    assert found.status == "warn" and "LP_NUM_THREADS=4" in found.value and "Unset" in found.mend
    assert tried.check_gl(gl(renderer="NVIDIA H100/PCIe/SSE2 | 4.6")).status == "ok"


def test_what_is_wrong_with_egl_is_told_apart(monkeypatch):
    monkeypatch.setattr(tried.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(tried, "has_gpu", lambda: False)
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    missing = tried.check_gl(gl(library=False, error="libEGL.so.1: cannot open"))
    assert missing.value.startswith("libEGL is missing")
    assert missing.mend.endswith("apt-get install -y libegl1 libgl1-mesa-dri libgl1 libglib2.0-0")
    none = tried.check_gl(gl(devices=[]))
    assert "no driver offers a device" in none.value and "libgl1-mesa-dri" in none.mend
    monkeypatch.setattr(tried, "has_gpu", lambda: True)
    monkeypatch.setattr(tried, "in_container", lambda: False)
    assert "libnvidia-gl" in tried.check_gl(gl(devices=[])).mend
    monkeypatch.setattr(tried.Path, "glob", lambda *_: [Path("/dev/dri/renderD128")])
    monkeypatch.setattr(tried.os, "access", lambda *_: False)
    locked = tried.check_gl(gl(devices=[BROKEN], error="no display"))
    assert locked.status == "fail" and "usermod -aG render,video" in locked.mend
    assert "killed by SIGABRT" in tried.check_gl(says(gl="killed by SIGABRT")).value


def test_cuda_against_egl_devices(monkeypatch):
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setattr(tried, "in_container", lambda: True)

    def found(cuda: list[str], devices: list[dict]):
        return tried.check_cuda(says(imports={"cuda": cuda}, gl={"devices": devices}))

    good = found(["A100", "A100"], [nvidia(1), nvidia(0), MESA])
    assert good.status == "ok"
    assert "EGL 1 = GPU 0, EGL 0 = GPU 1" in good.value and "MUJOCO_EGL_DEVICE_ID" in good.value
    mesa_first = found(["A100"], [MESA, nvidia(0)])
    assert mesa_first.status == "warn"
    assert mesa_first.mend.endswith("export MUJOCO_EGL_DEVICE_ID=1")
    none = found(["A100"], [MESA])
    assert none.status == "warn" and "NVIDIA_DRIVER_CAPABILITIES" in none.mend
    assert found([], []).status == "ok"


# --- imports, physics, speed ----------------------------------------------------------------------


def test_import_health():
    def found(**changes: Any):
        return tried.check_imports(says(imports={**IMPORTS, "cuda": [], **changes}))

    assert found().status == "ok"
    error = {"version": None, "error": "RuntimeError: operator torchvision::nms does not exist"}
    only_vision = found(torchvision=error)
    assert only_vision.status == "warn" and "pip uninstall -y torchvision" in only_vision.mend
    both = found(torchvision=error, transformers=error)
    assert both.status == "fail" and "pip uninstall -y torchvision" in both.mend
    assert found(torch=error).status == "fail"
    killed = tried.check_imports(says(imports="killed by SIGSEGV"))
    assert "force-reinstall" in killed.mend


def test_a_torchvision_that_does_not_fit_in_a_real_process(monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = tried.check_imports(ask)
    assert found.status in ("warn", "fail")
    assert "torchvision::nms" in found.value and "pip uninstall -y torchvision" in found.mend


@pytest.mark.parametrize(
    ("pack", "cm", "status"),
    [("libero", 1.46, "ok"), ("libero", 3.69, "fail"), ("lite", 0.0, "ok"), ("lite", 2.0, "fail")],
)
def test_settling_is_judged(pack, cm, status):
    found = tried.check_settle(says(settle={"pack": pack, "cm": cm, "mujoco": "3.8.1"}))
    assert found.status == status
    assert ("mujoco>=3.3,<3.4" in found.mend) is (status == "fail")


def test_settle_probe_on_the_lite_pack():
    answer = ask("settle", "lite")
    assert answer.data is not None, answer.trouble
    assert answer.data["cm"] < 0.01


@pytest.mark.libero_assets
def test_settle_probe_on_the_real_meshes(libero_assets_dir):
    answer = ask("settle", str(libero_assets_dir))
    assert answer.data is not None, answer.trouble
    assert answer.data["cm"] == pytest.approx(1.46, abs=0.01)


def test_speed_probe():
    answer = ask("speed", "lite")
    assert answer.data is not None, answer.trouble
    assert answer.data["states"] > 0 and answer.data["images"] > 0
    slow = tried.check_speed(says(speed={**answer.data, "images": 2.0, "states": 100.0}))
    assert slow.status == "warn" and "visual_profile='fast'" in slow.mend
    fast = tried.check_speed(says(speed={**answer.data, "images": 50.0, "states": 100.0}))
    assert fast.status == "ok" and "10.0 ms" in fast.value


def test_probes_that_fail_say_why(monkeypatch, tmp_path):
    answer = ask("settle", str(tmp_path))
    assert answer.data is None and "complete asset folder" in answer.trouble
    for check in (tried.check_settle, tried.check_speed):
        assert check(says(settle=answer.trouble, speed=answer.trouble)).status == "fail"
    program = tmp_path / "probe.py"
    monkeypatch.setattr(asking, "_PROBES", program)
    for code, expected in {
        "print('no json')": "exit code 0",
        "raise SystemExit('why')": "why",
        "import os; os.abort()": "killed by SIGABRT",
    }.items():
        program.write_text(code)
        assert ask("gl").trouble == expected
    program.write_text("import time; time.sleep(60)")
    started = time.monotonic()
    assert "no answer within" in ask("gl", timeout=0.3).trouble
    assert time.monotonic() - started < 10


# --- the report -----------------------------------------------------------------------------------


def test_checks_in_their_order_and_a_broken_one_is_reported_not_raised(monkeypatch):
    def fine(_):
        return asking.Finding("ok", "fine")

    def broken(_):
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "CHECKS", (("a", fine, False), ("b", broken, True)))
    assert [check.name for check in doctor.run_checks(quick=True)] == ["a"]
    _, second = doctor.run_checks()
    assert (second.status, second.value) == ("fail", "RuntimeError: boom")


def test_quick_run(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GYM_CACHE", os.environ.get("VLA_GYM_CACHE", str(tmp_path)))
    checks = {check.name: check for check in doctor.run_checks(quick=True)}
    assert {"python", "packages", "gl", "limits"} <= set(checks) and "speed" not in checks
    assert checks["assets: lite"].status == "ok"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(monkeypatch, capsys, status, code):
    monkeypatch.setattr(
        doctor, "run_checks", lambda quick: [doctor.Check("gl", status, f"x {quick}", "mend it")]
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
