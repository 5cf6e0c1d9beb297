"""A first run where something is missing ends in one message that says what to do.

Each runs as a user would, in a process of its own. A folder that nobody may write is a file in its
place: tests may run as root, whom permissions do not stop.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE = """
import gymnasium, vla_gym
env = gymnasium.make("Libero-goal-v0", task_ids=8, image_size=64)
env.reset(seed=0)
env.close()
print("works")
"""
MAKE_VEC = MAKE.replace('make("Libero-goal-v0"', 'make_vec("Libero-goal-v0", num_envs=2')
#: Hides a shared library from ctypes, as if it were not installed.
NO_EGL = """
import ctypes
class CDLL(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name and "libEGL" in str(name):
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = ctypes.cdll._dlltype = CDLL
"""
#: Every attempt to reach another machine fails.
NO_NETWORK = """
import socket
def connect(self, address):
    raise OSError(101, "Network is unreachable")
socket.socket.connect = connect
def getaddrinfo(*_, **__):
    raise socket.gaierror(-3, "Temporary failure in name resolution")
socket.getaddrinfo = getaddrinfo
"""


@pytest.fixture
def blocked(tmp_path) -> Path:
    """A path below which nothing can be written."""
    path = tmp_path / "file"
    path.write_text("")
    return path


def run(*arguments: str, sitecustomize: str = "", tmp_path: Path, **variables: str):
    """Run Python; ``sitecustomize`` is executed in it and in its children before anything else."""
    (tmp_path / "custom").mkdir(exist_ok=True)
    (tmp_path / "custom" / "sitecustomize.py").write_text(sitecustomize)
    first = variables.pop("PYTHONPATH", str(ROOT))
    path = os.pathsep.join([str(tmp_path / "custom"), first])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_line(result) -> str:
    assert result.returncode != 0, result.stdout
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("code", [MAKE, MAKE_VEC], ids=["make", "make_vec"])
def test_read_only_home(blocked, tmp_path, code):
    home = {"HOME": str(blocked), "VLA_GYM_CACHE": "", "XDG_CACHE_HOME": ""}
    message = last_line(run("-c", code, tmp_path=tmp_path, **home))
    assert "AssetError" in message and "VLA_GYM_CACHE" in message
    home["VLA_GYM_CACHE"] = os.environ["VLA_GYM_CACHE"]
    assert run("-c", code, tmp_path=tmp_path, **home).stdout == "works\n"


def test_read_only_home_and_installation(blocked, tmp_path):
    """numba would fail at import with a riddle: it has no folder for compiled code."""
    site = tmp_path / "site"
    shutil.copytree(
        ROOT / "vla_gym", site / "vla_gym", ignore=shutil.ignore_patterns("__pycache__")
    )
    (site / "vla_gym" / "sim" / "__pycache__").write_text("")
    where = {"PYTHONPATH": str(site), "HOME": str(blocked), "NUMBA_CACHE_DIR": ""}
    code = "import vla_gym.sim; print('works')"
    cache = tmp_path / "cache"
    fine = run("-c", code, tmp_path=tmp_path, VLA_GYM_CACHE=str(cache), **where)
    assert fine.stdout == "works\n", fine.stderr
    assert (cache / "numba").is_dir()
    bad = run("-c", code, tmp_path=tmp_path, VLA_GYM_CACHE=str(blocked / "cache"), **where)
    assert "ConfigError" in last_line(bad) and "VLA_GYM_CACHE" in last_line(bad)


@pytest.mark.parametrize(
    ("code", "backend"), [(MAKE, "egl"), (MAKE_VEC, "")], ids=["make", "make_vec"]
)
def test_no_egl_library(tmp_path, code, backend):
    result = run("-c", code, sitecustomize=NO_EGL, tmp_path=tmp_path, MUJOCO_GL=backend)
    message = last_line(result)
    assert "RenderError" in message
    assert "libEGL" in message and "apt-get install -y libegl1" in message


def test_without_images_no_egl_is_needed(tmp_path):
    code = MAKE.replace("image_size=64", "cameras=()")
    result = run("-c", code, sitecustomize=NO_EGL, tmp_path=tmp_path, MUJOCO_GL="")
    assert result.stdout == "works\n", result.stderr


def test_no_network(tmp_path):
    """Nothing that ships needs it."""
    code = MAKE.replace("Libero-goal", "LiberoVLA-goal").replace(", image_size=64", "")
    fine = run("-c", code, sitecustomize=NO_NETWORK, tmp_path=tmp_path)
    assert fine.stdout == "works\n", fine.stderr


def test_the_doctor_of_a_bare_machine(blocked, tmp_path):
    home = {"HOME": str(blocked), "VLA_GYM_CACHE": "", "XDG_CACHE_HOME": ""}
    arguments = ("-m", "vla_gym.cli.main", "doctor", "--quick")
    report = run(*arguments, sitecustomize=NO_EGL, tmp_path=tmp_path, **home)
    assert report.returncode == 1
    assert "Traceback" not in report.stdout + report.stderr
    text = " ".join(report.stdout.split())
    assert "no off-screen OpenGL" in text and "apt-get install" in text
    assert "export VLA_GYM_CACHE=" in text
