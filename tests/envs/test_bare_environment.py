"""A first run where something is missing ends in one message that says what to do.

Each runs as a user would, in a process of its own. A folder that nobody may write is a file in its
place: tests may run as root, whom permissions do not stop.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from run_python import ROOT, run_python

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


def run(code: str, tmp_path: Path, sitecustomize: str = "", fails: bool = False, **variables):
    """Run Python; ``sitecustomize`` is executed in it and in its children before anything else."""
    (tmp_path / "custom").mkdir(exist_ok=True)
    (tmp_path / "custom" / "sitecustomize.py").write_text(sitecustomize)
    first = variables.pop("PYTHONPATH", str(ROOT))
    path = os.pathsep.join([str(tmp_path / "custom"), first])
    return run_python(code, fails=fails, cwd=tmp_path, PYTHONPATH=path, **variables)


def last_line(code: str, tmp_path: Path, **how) -> str:
    """What a run that fails says last."""
    return run(code, tmp_path, fails=True, **how).stderr.strip().splitlines()[-1]


def test_read_only_home(blocked, tmp_path):
    home = {"HOME": str(blocked), "VLA_GYM_CACHE": None, "XDG_CACHE_HOME": None}
    message = last_line(MAKE, tmp_path, **home)
    assert "AssetError" in message and "VLA_GYM_CACHE" in message


def test_read_only_home_and_installation(blocked, tmp_path):
    """numba would fail at import with a riddle: it has no folder for compiled code."""
    site = tmp_path / "site"
    shutil.copytree(
        ROOT / "vla_gym", site / "vla_gym", ignore=shutil.ignore_patterns("__pycache__")
    )
    (site / "vla_gym" / "sim" / "__pycache__").write_text("")
    where = {"PYTHONPATH": str(site), "HOME": str(blocked), "NUMBA_CACHE_DIR": None}
    code = "import vla_gym.sim; print('works')"
    cache = tmp_path / "cache"
    assert run(code, tmp_path, VLA_GYM_CACHE=str(cache), **where).stdout == "works\n"
    assert (cache / "numba").is_dir()
    message = last_line(code, tmp_path, VLA_GYM_CACHE=str(blocked / "cache"), **where)
    assert "ConfigError" in message and "VLA_GYM_CACHE" in message


@pytest.mark.parametrize(
    ("code", "backend"), [(MAKE, "egl"), (MAKE_VEC, None)], ids=["make", "make_vec"]
)
def test_no_egl_library(tmp_path, code, backend):
    message = last_line(code, tmp_path, sitecustomize=NO_EGL, MUJOCO_GL=backend)
    assert "RenderError" in message
    assert "libEGL" in message and "apt-get install -y libegl1" in message


def test_without_images_no_egl_is_needed(tmp_path):
    code = MAKE_VEC.replace("image_size=64", "cameras=()")
    done = run(code, tmp_path, sitecustomize=NO_EGL, MUJOCO_GL=None)
    assert done.stdout == "works\n"


def test_no_network_and_a_cache_elsewhere_than_in_a_read_only_home(blocked, tmp_path):
    """Nothing that ships needs more."""
    code = MAKE.replace("Libero-goal", "LiberoVLA-goal").replace(", image_size=64", "")
    home = {"HOME": str(blocked), "XDG_CACHE_HOME": None}
    assert run(code, tmp_path, sitecustomize=NO_NETWORK, **home).stdout == "works\n"
