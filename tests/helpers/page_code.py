"""Code blocks of a page that have a title: files, and what is run beside them."""

from __future__ import annotations

import re
from typing import NamedTuple

from run_python import ROOT

_BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A code block: its language, its title, its text."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of docs/PAGE.md in their order."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [Block(*found) for found in _BLOCK.findall(text)]


def files(page: str) -> dict[str, str]:
    """Return the texts of the blocks whose title is a file's path."""
    return {block.title: block.text for block in blocks(page) if "/" in block.title}
