"""Packages as an installer leaves them: modules, and metadata with their entry points."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from run_python import ROOT

_REACH = ROOT / "examples" / "reach_suite"
#: Texts of the example of a suite, by path.
REACH_SUITE = {f"reach_suite/{p.name}": p.read_text() for p in _REACH.iterdir() if p.is_file()}


def install(site: Path, files: Mapping[str, str]) -> None:
    """Put packages into a folder for ``sys.path``.

    Args:
        site: The folder; it is made.
        files: Texts by path: modules, and a ``pyproject.toml`` for each package.
    """
    site.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if name.endswith(".py"):
            (site / Path(name).name).write_text(text)
        else:
            project = tomllib.loads(text)["project"]
            write_metadata(site, project["name"], project["entry-points"])


def write_metadata(site: Path, name: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Write what importlib.metadata reads of a package; ``entry_points`` by group and name."""
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    with (info / "entry_points.txt").open("w") as file:
        for group, points in entry_points.items():
            file.writelines([f"[{group}]\n", *(f"{key} = {points[key]}\n" for key in points)])
