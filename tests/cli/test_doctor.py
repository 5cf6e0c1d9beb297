"""The doctor tells what is missing and how to mend it, and never raises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from vla_gym.cli import doctor
from vla_gym.cli import main as cli
from vla_gym.cli.doctor import Finding, ProbeError


def says(**answers: Any):
    """Return probes that say these things; a ProbeError is why there is no answer."""

    def answer(probe: str, *_: str) -> Any:
        if isinstance(answers[probe], Exception):
            raise answers[probe]
        return answers[probe]

    return answer


def test_packages_are_checked_against_what_the_package_declares(monkeypatch):
    assert doctor.check_packages("").status == "ok"
    versions = {"mujoco": "3.4.0", "numpy": "1.26.4"}
    declared = ["mujoco<3.4,>=3.3", "numpy<2", "torch>=2.5", 'tensorboard>=2; extra == "trainers"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: declared)

    def version(name):
        try:
            return versions[name]
        except KeyError as error:
            raise doctor.importlib.metadata.PackageNotFoundError(name) from error

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = doctor.check_packages("")
    assert found.status == "fail"
    assert found.value == "mujoco 3.4.0, expected <3.4,>=3.3; torch is not installed"
    assert found.mend.startswith("pip install 'mujoco<3.4,>=3.3'")
    assert "settle differently" in found.mend and "pip install 'torch>=2.5'" in found.mend
    extra = doctor.check_packages("trainers")
    assert (extra.status, extra.value) == ("warn", "tensorboard is not installed")
    assert "[trainers]" in extra.mend


def test_missing_real_meshes_are_only_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GYM_LIBERO_ASSETS", str(tmp_path / "gone"))
    found = doctor.check_assets("libero")
    assert found.status == "warn" and "gone does not exist" in found.mend


def test_cache_folder(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VLA_GYM_CACHE", str(blocker / "cache"))
    found = doctor.check_cache()
    assert found.status == "fail" and "export VLA_GYM_CACHE=" in found.mend
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    assert doctor.check_cache().status == "ok"
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert doctor.check_cache().status == "warn"


def test_limits(monkeypatch):
    assert doctor.check_limits().status == "ok"
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (64, 4096))
    assert doctor.check_limits().mend == "ulimit -n 4096"

    def refused(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(doctor.os, "memfd_create", refused)
    assert doctor.check_limits().status == "fail"


def test_gl_in_a_real_process(monkeypatch):
    found = doctor.check_gl()
    assert found.status in ("ok", "warn") and ("Mesa" in found.value or "NVIDIA" in found.value)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "77")
    found = doctor.check_gl()
    assert found.status == "fail" and "no off-screen OpenGL (" in found.value
    assert found.mend.startswith("Unset MUJOCO_EGL_DEVICE_ID")


@pytest.mark.parametrize("gpu", [False, True])
def test_gl_is_judged(monkeypatch, gpu):
    monkeypatch.setattr(doctor.Path, "exists", lambda _: gpu)
    monkeypatch.delenv("LP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setattr(doctor, "ask", says(gl="llvmpipe (LLVM 15) | 4.5 Mesa"))
    found = doctor.check_gl()
    assert found.status == "warn" and "on the CPU" in found.value
    assert ("NVIDIA_DRIVER_CAPABILITIES=all" in found.mend) is gpu
    monkeypatch.setenv("LP_NUM_THREADS", "4")
    assert doctor.check_gl().mend.startswith("Unset LP_NUM_THREADS") is not gpu
    monkeypatch.setattr(doctor, "ask", says(gl="NVIDIA H100/PCIe/SSE2 | 4.6"))
    assert doctor.check_gl().status == "ok"
    monkeypatch.setattr(doctor, "ask", says(gl=ProbeError("libEGL.so.1: cannot open")))
    missing = doctor.check_gl()
    assert missing.status == "fail" and missing.mend.startswith(doctor.APT_LINE)
    assert ("libnvidia-gl" in missing.mend) is gpu


def test_imports_are_judged(monkeypatch):
    monkeypatch.setattr(doctor, "ask", says(imports={"versions": "torch 2", "cuda": ["A100"]}))
    assert doctor.check_imports() == Finding("ok", "torch 2, CUDA: A100")
    monkeypatch.setattr(doctor, "ask", says(imports=ProbeError("killed by SIGSEGV")))
    assert "force-reinstall" in doctor.check_imports().mend


def test_a_torchvision_that_does_not_fit_in_a_real_process(monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.check_imports()
    assert found.status == "fail"
    assert "torchvision::nms" in found.value and "pip uninstall" in found.mend


@pytest.mark.parametrize(
    ("pack", "cm", "status"),
    [("libero", 1.46, "ok"), ("libero", 3.69, "fail"), ("lite", 2.0, "fail")],
)
def test_settling_is_judged(monkeypatch, pack, cm, status):
    monkeypatch.setattr(doctor, "ask", says(settle=cm))
    there = Finding("ok" if pack == "libero" else "warn", "")
    monkeypatch.setattr(doctor, "check_assets", lambda _: there)
    found = doctor.check_settle()
    assert found.status == status and f"({pack} pack)" in found.value
    assert ("mujoco>=3.3,<3.4" in found.mend) is (status == "fail")


@pytest.mark.libero_assets
def test_settle_probe_on_the_real_meshes(libero_assets_dir):
    assert doctor.ask("settle", str(libero_assets_dir)) == pytest.approx(1.46, abs=0.01)


def test_probes_that_fail_say_why(monkeypatch, tmp_path):
    with pytest.raises(ProbeError, match="complete asset folder"):
        doctor.ask("settle", str(tmp_path))
    run = subprocess.run
    for code, expected in {
        "raise SystemExit(3)": "exit code 3",
        "raise SystemExit('why')": "why",
        "import os; os.abort()": "killed by SIGABRT",
        "import time; time.sleep(60)": "no answer within 1 s",
    }.items():

        def program(command, code=code, **options):
            return run([command[0], "-c", code], **options)

        monkeypatch.setattr(subprocess, "run", program)
        with pytest.raises(ProbeError, match=expected):
            doctor.ask("gl", timeout=1.0)


def test_checks_in_their_order_and_a_broken_one_is_reported_not_raised(monkeypatch):
    def broken():
        raise RuntimeError("boom")

    def silent():
        raise ProbeError("killed by SIGSEGV")

    checks = (("a", lambda: Finding("ok", "fine"), False), ("b", broken, True), ("c", silent, True))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert list(doctor.run_checks(quick=True)) == ["a"]
    found = doctor.run_checks()
    assert list(found) == ["a", "b", "c"]
    assert found["b"][:2] == ("fail", "RuntimeError: boom")
    assert found["c"][:2] == ("fail", "killed by SIGSEGV")


def test_quick_run(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GYM_CACHE", os.environ.get("VLA_GYM_CACHE", str(tmp_path)))
    found = doctor.run_checks(quick=True)
    assert {"packages", "gl", "limits"} <= set(found) and "settle" not in found
    assert found["assets: lite"].status == "ok"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(monkeypatch, capsys, status, code):
    monkeypatch.setattr(
        doctor,
        "run_checks",
        lambda quick, protocol: {"gl": Finding(status, f"x {quick} {protocol}", "mend it")},
    )
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    expected = {"name": "gl", "status": status, "value": "x False None", "mend": "mend it"}
    assert report["checks"] == [expected]
    assert cli.main(["doctor", "--quick"]) == code
    text = capsys.readouterr().out
    assert "mend it" in text and "x True" in text
    assert ("works here" in text) is (code == 0)


def test_a_late_probe_is_no_reason_to_install_anything_again(monkeypatch):
    late = doctor.ProbeTimeout("no answer within 300 s")
    monkeypatch.setattr(doctor, "ask", says(imports=late))
    monkeypatch.setattr(doctor, "CHECKS", (("imports", doctor.check_imports, True),))
    found = doctor.run_checks()["imports"]
    assert found.value == str(late) and "less busy" in found.mend
