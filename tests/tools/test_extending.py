"""docs/extending.md is followed: its packages are installed, its blocks run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import page_code
import pytest
from installed_packages import REACH_SUITE, install
from run_python import ROOT

BLOCKS = [block for block in page_code.blocks("extending") if "/" not in block.title]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the page's packages, and metadata of them as an installer writes it."""
    folder = tmp_path_factory.mktemp("extending")
    install(folder / "site", page_code.files("extending") | REACH_SUITE)
    return folder


@pytest.mark.slow  # the commands play whole episodes
@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize("title", sorted({block.title for block in BLOCKS}))
def test_the_blocks_of_the_page_run(folder, title):
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{ROOT}"
    environment["VLA_GYM_ASSETS"] = "lite"
    for block in (block for block in BLOCKS if block.title == title):
        command = ["bash", "-euc"] if block.language == "bash" else [sys.executable, "-c"]
        run = subprocess.run(
            [*command, block.text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0, run.stderr
