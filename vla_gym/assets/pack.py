"""Find or make an asset pack and check that it is complete."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from vla_gym.assets.cache import cache_dir
from vla_gym.errors import AssetError

LIBERO_VARIABLE = "VLA_GYM_LIBERO_ASSETS"

# What the libero_goal scene loads, relative to the pack's root.
SCENE_FILES = ("scenes/libero_tabletop_base_style.xml",)
OBJECT_FILES = (
    "stable_scanned_objects/akita_black_bowl/akita_black_bowl.xml",
    "stable_scanned_objects/plate/plate.xml",
    "stable_hope_objects/cream_cheese/cream_cheese.xml",
    "turbosquid_objects/wine_bottle/wine_bottle.xml",
    "turbosquid_objects/wine_rack/wine_rack.xml",
    "articulated_objects/wooden_cabinet.xml",
    "articulated_objects/flat_stove.xml",
)
REQUIRED_FILES = SCENE_FILES + OBJECT_FILES

# Where a LIBERO checkout, an installed package or an unpacked download keeps its assets.
_SUBFOLDERS = ("", "assets", "libero/assets", "libero/libero/assets")


@dataclass(frozen=True)
class AssetPack:
    """A complete asset folder.

    Attributes:
        name: ``"lite"`` or ``"libero"``; results always state it.
        root: Folder with LIBERO's layout (``scenes/``, ``stable_hope_objects/``, ...).
        digest: Hexadecimal digest of the pack; caches of compiled scenes are keyed by it.
    """

    name: str
    root: Path
    digest: str


def resolve_asset_pack(assets: str | Path = "lite") -> AssetPack:
    """Return the asset pack that a user named.

    Args:
        assets: ``"lite"``: generated on first use into :func:`~vla_gym.assets.cache_dir`.
            ``"libero"``: the folder named by the environment variable
            ``VLA_GYM_LIBERO_ASSETS``, else ``libero-assets`` in the cache folder.
            Anything else is a path to a LIBERO asset folder, a LIBERO checkout, or a folder
            that this package generated.

    Raises:
        AssetError: If the folder does not exist or lacks files.
    """
    if assets == "lite":
        from vla_gym.assets.lite.generate import ensure_lite_pack

        root, digest = ensure_lite_pack(cache_dir() / "assets")
        return AssetPack("lite", root, digest)
    if assets == "libero":
        return _libero_pack()
    return _pack_at(Path(assets).expanduser().absolute(), f"assets={str(assets)!r}", _ADVICE)


_ADVICE = (
    "Give 'lite' (needs no download), 'libero', or the path of LIBERO's asset folder "
    "(the one that holds 'scenes' and 'stable_hope_objects') or of a LIBERO checkout."
)


def _libero_pack() -> AssetPack:
    """Resolve ``"libero"``: the environment variable first, then the cache folder."""
    configured = os.environ.get(LIBERO_VARIABLE)
    if configured:
        path = Path(configured).expanduser().absolute()
        return _pack_at(path, f"{LIBERO_VARIABLE}={configured}", _ADVICE)
    path = cache_dir() / "libero-assets"
    advice = (
        f"Set {LIBERO_VARIABLE} to LIBERO's asset folder or to a LIBERO checkout, put the assets "
        f"into {path}, or use assets='lite', which needs no download."
    )
    return _pack_at(path, "the 'libero' asset pack", advice)


def _pack_at(path: Path, what: str, advice: str) -> AssetPack:
    """Return the pack in a folder, or raise an AssetError that says what is wrong with it."""
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise AssetError(
            f"{what}: expected a folder with LIBERO's assets, but {path} {state}. {advice}"
        )
    candidates = [path / sub if sub else path for sub in _SUBFOLDERS]
    missing = [[f for f in REQUIRED_FILES if not (root / f).is_file()] for root in candidates]
    best = min(range(len(candidates)), key=lambda i: len(missing[i]))
    if missing[best]:
        shown = ", ".join(missing[best][:3]) + (", ..." if len(missing[best]) > 3 else "")
        raise AssetError(
            f"{what}: expected a complete asset folder, but {candidates[best]} lacks "
            f"{len(missing[best])} of {len(REQUIRED_FILES)} files ({shown}). {advice}"
        )
    root = candidates[best]
    from vla_gym.assets.lite.generate import damaged_files, read_manifest

    manifest = read_manifest(root)
    if manifest is not None:
        if damaged := damaged_files(root, manifest):
            raise AssetError(
                f"{what}: {root} is a generated lite pack, but {', '.join(damaged)} is not as it "
                "was written. Give 'lite' to have the pack written again."
            )
        return AssetPack("lite", root, manifest["digest"])
    return AssetPack("libero", root, _folder_digest(root))


def _folder_digest(root: Path) -> str:
    """Digest the contents of all MJCF files and the paths and sizes of all other files.

    Meshes and textures count by size alone: reading a hundred megabytes at every start would take
    longer than loading the compiled scene.
    """
    digest = hashlib.sha256()
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            digest.update(f"{relative}\0{path.stat().st_size}\0".encode())
            if name.endswith(".xml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
