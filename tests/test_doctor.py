"""The doctor tells what is missing and how to mend it, and never raises."""

from __future__ import annotations

import json
import subprocess

import pytest

from vla_gym import cli, doctor


def test_package_pins_are_checked(monkeypatch):
    versions = {"mujoco": "3.4.0", "numpy": "1.26.4"}
    monkeypatch.setattr(doctor.importlib.metadata, "version", versions.__getitem__)
    newer = doctor.check_package("mujoco", ">=3.3,<3.4")
    assert newer.status == "fail"
    assert newer.value == "3.4.0, expected >=3.3,<3.4"
    assert newer.mend == "pip install 'mujoco>=3.3,<3.4'"
    assert doctor.check_package("numpy", "<2").status == "ok"


def test_missing_package():
    assert doctor.check_package("no-such-distribution", ">=1").status == "fail"
    assert doctor.check_package("no-such-distribution", ">=1", required=False).status == "warn"


def test_gl_renderer_string():
    check = doctor.check_gl()
    assert check.status == "ok", check
    assert "Mesa" in check.value or "NVIDIA" in check.value


def test_missing_egl_names_the_mend(monkeypatch):
    def no_egl(*_, **__):
        return subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no libEGL")

    monkeypatch.setattr(doctor.subprocess, "run", no_egl)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/apt-get")
    check = doctor.check_gl()
    assert check.status == "fail"
    assert "ImportError: no libEGL" in check.value
    assert check.mend.endswith("apt-get install -y libegl1 libgl1-mesa-dri libgl1 libglib2.0-0")


def test_hanging_driver_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "_GL_PROBE", "import time; time.sleep(60)")
    check = doctor.check_gl(timeout=0.2)
    assert check.status == "fail"
    assert "no answer" in check.value


def test_missing_real_meshes_are_only_a_warning(monkeypatch, tmp_path):
    monkeypatch.delenv("VLA_GYM_LIBERO_ASSETS", raising=False)
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    check = doctor.check_assets("libero")
    assert check.status == "warn"
    assert "VLA_GYM_LIBERO_ASSETS" in check.mend


def test_corrupt_weights_are_found(monkeypatch, tmp_path):
    from vla_gym.vla import files

    monkeypatch.setattr(files, "WEIGHTS_ROOT", tmp_path)
    assert doctor.check_weights("mini").status == "fail"  # absent
    for name in ("mini", "mini-rl-token"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("weights")
        files.write_checksums(tmp_path / name)
    assert doctor.check_weights("mini").status == "ok"
    (tmp_path / "mini-rl-token" / "model.safetensors").write_text("weighty")
    corrupt = doctor.check_weights("mini")
    assert corrupt.status == "fail"
    assert "model.safetensors" in corrupt.mend


def test_unusable_cache_folder(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VLA_GYM_CACHE", str(blocker / "cache"))
    check = doctor.check_cache()
    assert check.status == "fail"
    assert "VLA_GYM_CACHE" in check.mend


def test_a_broken_check_is_reported_not_raised(monkeypatch):
    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "check_cores", broken)
    monkeypatch.setattr(doctor, "check_gl", lambda: doctor.Check("gl", "ok", "llvmpipe"))
    last = doctor.run_checks()[-1]
    assert (last.name, last.status, last.value) == ("cores", "fail", "RuntimeError: boom")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(monkeypatch, capsys, status, code):
    monkeypatch.setattr(doctor, "run_checks", lambda: [doctor.Check("gl", status, "x", "mend it")])
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert report["checks"] == [{"name": "gl", "status": status, "value": "x", "mend": "mend it"}]
    assert cli.main(["doctor"]) == code
    assert "mend it" in capsys.readouterr().out


def test_pins_are_those_of_the_package():
    """The doctor's table repeats pyproject.toml: they must not drift apart."""
    import tomllib
    from pathlib import Path

    from packaging.requirements import Requirement

    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    declared = {
        requirement.name: requirement.specifier
        for line in project["dependencies"] + project["optional-dependencies"]["trainers"]
        for requirement in [Requirement(line)]
    }
    for name, specifier in {**doctor.REQUIREMENTS, **doctor.OPTIONAL}.items():
        if name != "robosuite":  # comes with rlinf-libero
            assert declared[name] == specifier, name
