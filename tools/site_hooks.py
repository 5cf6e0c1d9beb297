"""Hooks of mkdocs.yml: one text for GitHub and the site.

Links are written as GitHub resolves them, relative to the file. README.md and the other pages at
the top of the repository are pages of the site as they are, README.md its home. A source file or
folder that a page links to becomes a page with its code, so that the site needs no other host.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "RELEASING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".json": "json"}
#: What would be fetched from elsewhere when a page is opened.
FETCHED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository, and one for each source that is linked to."""
    for name in TOP_PAGES:
        files.append(generated(config, name, (ROOT / name).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            target = repository_path(page.src_uri, match[1])
            if is_source(target) and site_path(target) not in files.src_uris:
                text = "".join(source_page(ROOT / target))
                files.append(generated(config, target, text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    del config, files
    here = page.file.src_uri
    if not repository_path(here).endswith((".md", ".ipynb")):  # in code nothing is a link
        return markdown

    def to_site(match: re.Match[str]) -> str:
        target = site_path(repository_path(here, match[1]))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(to_site, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that loads anything from another host.

    Raises:
        PluginError: If a page does.
    """
    for file in Path(config.site_dir).rglob("*.html"):
        if found := FETCHED.search(file.read_text(encoding="utf-8")):
            raise PluginError(f"{file} loads from another host: {found[0]}")


def repository_path(page: str, link: str = "") -> str:
    """Return the file behind a page of the site or a link in it, from the top of the repository."""
    page = page.replace("index.md", "README.md")
    named = (f"docs/{page}", page, page.removesuffix(".md"))
    file = next(file for file in named if (ROOT / file).exists())
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), link)) if link else file


def site_path(path: str) -> str:
    """Return the page of the site, or the picture, that a file of the repository is."""
    if is_source(path) and not path.endswith(".md"):
        return f"{path}.md"
    return path.removeprefix("docs/").replace("README.md", "index.md")


def is_source(path: str) -> bool:
    """Return whether that is a file or folder outside docs/ which is no page by itself."""
    if path.startswith(("docs/", "..")) or path in TOP_PAGES:
        return False
    return (ROOT / path).exists()


def generated(config: MkDocsConfig, name: str, content: str) -> File:
    """Return a page that is no file in docs/."""
    return File.generated(config, site_path(name), content=content)


def source_page(path: Path) -> Iterator[str]:
    """Yield the Markdown of a page with the code of a file, or of all files of a folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        yield path.read_text(encoding="utf-8")
        return
    if path.suffix == ".ipynb":
        yield from notebook_page(json.loads(path.read_text(encoding="utf-8")))
        return
    yield f"---\ntitle: {path.name}\n---\n\n# {name}\n"
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            yield f"\n## {file.name}\n" if path.is_dir() else ""
            text = file.read_text(encoding="utf-8")
            yield f"\n``````{LANGUAGES.get(file.suffix, 'text')}\n{text}``````\n"


def notebook_page(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield a notebook with its outputs as Markdown; pictures are part of the page."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield f"\n{text}\n" if cell["cell_type"] == "markdown" else f"\n```python\n{text}\n```\n"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if picture := data.get("image/png"):
                yield f'\n<img src="data:image/png;base64,{picture.strip()}" alt="">\n'
            elif "text/html" in data:
                yield f"\n<div>{' '.join(''.join(data['text/html']).split())}</div>\n"
            elif shown := "".join(output.get("text", "") or data.get("text/plain", "")):
                yield f"\n```text\n{shown.rstrip()}\n```\n"
