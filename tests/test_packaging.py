"""What is installed: every package and data file, nothing beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from run_python import ROOT, copy_checkout, run_python

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
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {vla_gym.__version__}\n" in citation
    assert f"## [{vla_gym.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The files that git tracks or would track."""
    pytest.importorskip("setuptools", minversion="77")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return copy_checkout(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def packaged(source) -> set[str]:
    """The files that an installed package holds, by their names in a wheel; before a build."""
    found = {"vla_gym": "vla_gym", "vla_gym_trainers": "vla_gym_trainers"}
    found |= {"wrappers": "vla_gym/wrappers", "configs": "vla_gym/configs"}
    return {
        f"{name}/{file.relative_to(source / top)}"
        for top, name in found.items()
        for file in (source / top).rglob("*")
        if file.is_file()
    }


def build(kind: str, source: Path, out: Path) -> Path:
    """Return a distribution, built without network."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return next(path for path in out.iterdir() if path.suffix in (".whl", ".gz"))


@pytest.fixture(scope="module")
def sdist(source, packaged, tmp_path_factory) -> Path:
    del packaged  # a build leaves files in the source
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """A wheel of the source distribution, as ``python -m build`` makes it: without symlinks."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel, packaged):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == packaged
    assert wheel.stat().st_size < 30e6


def test_sdist_holds_what_belongs_to_a_release_and_no_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "results"))]


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
    run_python(code, cwd=tmp_path, PYTHONPATH=None)


def test_a_package_behind_a_symlink_is_on_the_compilers_path_once(tmp_path):
    """LIBERO's assets are refused where site-packages is found under two names."""
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    code = (
        "from vla_gym.suites import disk_cache\n"
        "print(disk_cache._compiler_environment()['PYTHONPATH'])\n"
    )
    run = run_python(code, cwd=tmp_path, PYTHONPATH=str(link), PYTHONSAFEPATH="1")
    paths = run.stdout.strip().split(os.pathsep)
    assert str(link) in paths and str(ROOT) not in paths, run.stderr
