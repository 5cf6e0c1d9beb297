"""Which files of LIBERO's assets the tasks load, and what they must look like.

The list is made by ``tools/make_libero_manifest.py``. MJCF files have a SHA-256 there, because
they decide the physics; meshes and textures are listed by path alone. A copy of the assets may lack
textures of floors and walls, which others stand in for, and what LIBERO-PRO's variants add.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from msgspec import Struct

from vla_gym.outside import file_sha256, read_json

MANIFEST_FILE = Path(__file__).with_name("libero_manifest.json")

# Where a LIBERO checkout, an installed package or an unpacked download keeps its assets.
_SUBFOLDERS = ("", "assets", "libero/assets", "libero/libero/assets")


class Listed(Struct, frozen=True):
    """Paths below a pack's root.

    Attributes:
        files: What LIBERO needs, each MJCF file with its SHA-256.
        variants: What LIBERO-PRO's variants need besides, likewise.
        optional: Textures that other ones can stand in for.
    """

    files: dict[str, str | None]
    variants: dict[str, str | None]
    optional: list[str]


@cache
def listed() -> Listed:
    """Return the list."""
    return read_json(MANIFEST_FILE, Listed)


def present_files(root: Path) -> list[str]:
    """Return the needed files and those others that a complete pack has."""
    others = [*listed().optional, *listed().variants]
    return [*listed().files, *(name for name in others if (root / name).is_file())]


def best_root(folder: Path) -> tuple[Path, list[str]]:
    """Find the assets in a folder: the folder itself or where a LIBERO checkout keeps them.

    Returns:
        The best candidate and what it lacks.
    """
    lacking = {
        root: [name for name in listed().files if not (root / name).is_file()]
        for root in (folder / sub for sub in _SUBFOLDERS)
    }
    return min(lacking.items(), key=lambda found: len(found[1]))


def shorten(names: list[str]) -> str:
    """Return the first three names, and an ellipsis if there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def damaged_files(root: Path, expected: dict[str, str]) -> list[str]:
    """Return the files that are absent or whose SHA-256 is not the expected one."""
    damaged = []
    for name, digest in expected.items():
        try:
            if file_sha256(root / name) == digest:
                continue
        except OSError:
            pass
        damaged.append(name)
    return damaged


def published_mjcf(root: Path) -> dict[str, str]:
    """Return the SHA-256 that each MJCF file of a complete pack must have."""
    known = listed().files | listed().variants
    return {name: sha for name in present_files(root) if (sha := known.get(name))}


def pack_digest(root: Path) -> str:
    """Digest the MJCF files' contents and the other files' paths and sizes.

    Only files that the tasks load count, so the wheels and a copy of the same assets have the same
    digest. Meshes and textures count by size alone: reading a hundred megabytes at
    every start would take longer than loading the compiled scene.
    """
    digest = hashlib.sha256()
    for name in sorted(present_files(root)):
        path = root / name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        if name.endswith(".xml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
