"""Writes the list of the asset files that LIBERO's tasks load, for ``vla-gym assets``.

Usage: ``python tools/make_libero_manifest.py ASSETS [OUT]`` with LIBERO's real asset folder. Every
scene is built through LIBERO's own classes; what they open and what the resulting models name is
the list, what only LIBERO-PRO's variants ask for a list of its own. MJCF
files come with their SHA-256, because they decide the physics; meshes and textures are listed by
path alone, and their checksums come from the wheels. Textures of floors and walls that ASSETS lacks
are listed as optional, with those that may stand in for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

from vla_gym.suites import SUITES, VARIANTS, suite_tasks
from vla_gym.suites.libero import upstream_env

OUT = Path(__file__).resolve().parents[1] / "vla_gym" / "assets" / "libero_manifest.json"


def named_files(root: Path, suites: Iterable[str]) -> set[Path]:
    """Return the real paths of the files below ``root`` that the suites' scenes ask for.

    LIBERO must have been prepared for ``root``.
    """
    opened: set[str] = set()

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            opened.add(arguments[0])

    sys.addaudithook(watch)
    scenes = {}
    for suite in suites:
        for task in suite_tasks(suite):
            scenes.setdefault(task.scene_name, task)
    for count, task in enumerate(scenes.values(), 1):
        sys.stderr.write(f"{count}/{len(scenes)} {task.key} {task.name}\n")
        model = ET.fromstring(upstream_env.make_env(task.bddl_file).env.model.get_xml())
        opened.update(node.get("file", "") for node in model.iter())
    real = {Path(os.path.realpath(path)) for path in opened if path}
    return {path for path in real if not path.is_dir() and path.is_relative_to(root)}


def listed(root: Path, paths: Iterable[Path]) -> dict[str, str | None]:
    """Return those that exist, each MJCF file with its SHA-256."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix == ".xml"
        else None
        for path in sorted(paths)
        if path.exists()
    }


def main() -> None:
    """Write the manifest."""
    root = Path(os.path.realpath(sys.argv[1]))
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else OUT
    # One folder for both: LIBERO's classes keep the paths of the first.
    with tempfile.TemporaryDirectory() as folder:
        upstream_env.prepare(root, Path(folder))
        own = named_files(root, SUITES)
        variants = named_files(root, VARIANTS) - own
    files = listed(root, own)
    optional = {path.relative_to(root).as_posix() for path in own if not path.exists()}
    # What an older copy of the assets lacked stays optional: folders of one are played too.
    optional |= set(json.loads(OUT.read_text(encoding="utf-8"))["optional"])
    optional |= {f"textures/{name}" for name in upstream_env._STAND_INS.values()}
    manifest = {
        "files": {name: digest for name, digest in files.items() if name not in optional},
        "optional": sorted(optional),
        "variants": listed(root, variants),
    }
    out.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(f"{out}: {len(files)} files and {len(optional)} optional ones\n")


if __name__ == "__main__":
    main()
