"""The documentation: pages, links and anchors, as GitHub and as a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_python import ROOT, copy_checkout

TOP = [
    ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "RELEASING", "CHANGELOG", "SECURITY")
]
PAGES = [*TOP, *sorted(ROOT.glob("docs/*.md")), ROOT / "results" / "notes.md"]
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s]+)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class ConfigLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags call functions of libraries that are not installed."""


ConfigLoader.add_multi_constructor("!", lambda *_: None)
ConfigLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_navigation_once():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), ConfigLoader)
    listed = [page for section in config["nav"] for pages in section.values() for page in pages]
    expected = [page.name for page in PAGES if page.parent.name != "results"]
    assert sorted(listed) == sorted(name.replace("README", "index") for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    """README is the home, a linked source is a page; another host's picture is refused."""
    pytest.importorskip("material", reason="needs pip install -e '.[docs]'")
    source = copy_checkout(tmp_path / "source")
    assert (built := build(source)).returncode == 0, built.stderr
    assert "Two commands" in (source / "site" / "index.html").read_text()
    assert "make_sb3_vec_env" in (source / "site/examples/sb3_sac.py.html").read_text()

    with (source / "docs" / "limits.md").open("a") as page:
        page.write("\n![a badge](https://example.org/badge.svg)\n")
    assert (built := build(source)).returncode != 0
    assert "limits.html loads from another host" in built.stderr


def build(source: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=140,
    )
