"""docs/extending.md is followed: its packages are installed, its blocks run."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import page_code
import pytest

BLOCKS = [block for block in page_code.blocks("extending") if "/" not in block.title]
SUITE = page_code.ROOT / "examples" / "reach_suite"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the page's packages, and metadata of them as an installer writes it."""
    folder = tmp_path_factory.mktemp("extending")
    files = page_code.files("extending")
    files |= {
        f"reach_suite/{file.name}": file.read_text() for file in SUITE.iterdir() if file.is_file()
    }
    for name, text in files.items():
        path = folder / "site" / Path(name).name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".py":
            path.write_text(text)
            continue
        project = tomllib.loads(text)["project"]
        info = path.parent / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n"
        )
        points = [
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
            for group, found in project["entry-points"].items()
        ]
        (info / "entry_points.txt").write_text("\n".join(points))
    return folder


@pytest.mark.slow  # the commands play whole episodes
@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize("title", sorted({block.title for block in BLOCKS}))
def test_the_blocks_of_the_page_run(folder, title):
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{page_code.ROOT}"
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
