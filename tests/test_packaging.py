"""What is installed: every package and data file, nothing beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_wrappers_and_configs_are_symlinks_into_the_top_folders():
    for name in ("wrappers", "configs"):
        link = ROOT / "vla_gym" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert PROJECT["tool"]["setuptools"]["package-dir"][f"vla_gym.{name}"] == name


def test_version_is_stated_once_and_the_same():
    import vla_gym

    assert vla_gym.__version__ == PROJECT["project"]["version"]
    assert f"## [{vla_gym.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the files that git tracks or would track, built without network."""
    pytest.importorskip("setuptools", minversion="77")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    source = tmp_path_factory.mktemp("source")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).exists():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    out = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return next(out.glob("*.whl"))


def test_wheel_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "vla_gym",
        "vla_gym_trainers",
    }
    expected = [
        *ROOT.glob("vla_gym/weights/*/*"),
    ]
    expected += [ROOT / "vla_gym" / "configs" / file.name for file in ROOT.glob("configs/*.yaml")]
    expected += [ROOT / "vla_gym" / "wrappers" / file.name for file in ROOT.glob("wrappers/*.py")]
    expected += [*ROOT.glob("vla_gym/**/*.py"), *ROOT.glob("vla_gym_trainers/**/*.py")]
    expected += [*ROOT.glob("vla_gym_trainers/**/*.css")]
    missing = {str(file.relative_to(ROOT)) for file in expected} - names
    assert not missing
    assert wheel.stat().st_size < 30e6


def test_wheel_imports_outside_the_checkout(wheel, tmp_path):
    """`vla_gym.wrappers` comes from the wheel, and no top-level `wrappers` or `configs` exists."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import importlib.util as util, sys\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        "import vla_gym.configs, vla_gym.wrappers\n"
        f"assert vla_gym.wrappers.__file__.startswith({str(site)!r}), vla_gym.wrappers.__file__\n"
        "assert all(util.find_spec(name) is None for name in ('wrappers', 'configs'))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
