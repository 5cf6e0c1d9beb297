"""Find or make an asset pack and check that it is complete."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from vla_gym.assets.cache import cache_dir
from vla_gym.assets.manifest import best_root, libero_files, pack_digest, shorten
from vla_gym.errors import AssetError, AssetWarning

LIBERO_VARIABLE = "VLA_GYM_LIBERO_ASSETS"

_warned = threading.Event()


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
            ``"auto"``: ``"libero"`` if it is there, else ``"lite"`` with one
            :class:`~vla_gym.errors.AssetWarning` a process; nothing is downloaded.
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
    if assets == "auto":
        return _auto_pack()
    return _pack_at(Path(assets).expanduser().absolute(), f"assets={str(assets)!r}", _ADVICE)


_ADVICE = (
    "Give 'lite' (needs no download), 'libero', 'auto', or the path of LIBERO's asset folder "
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
        f"Get the assets with `vla-gym assets download`, set {LIBERO_VARIABLE} to LIBERO's asset "
        "folder or to a LIBERO checkout, or use assets='lite', which needs no download."
    )
    return _pack_at(path, "the 'libero' asset pack", advice)


def _auto_pack() -> AssetPack:
    """Resolve ``"auto"``: the real pack if it is there, else the lite one, said once a process."""
    try:
        return _libero_pack()
    except AssetError as error:
        from vla_gym.assets.hub import HUB_REPO_SIZE

        pack, reason = resolve_asset_pack("lite"), str(error).split(". ")[0]
    if not _warned.is_set():
        _warned.set()
        warnings.warn(
            f"assets='auto' takes the lite pack, whose images are not LIBERO's ({reason}). "
            "To get the real meshes: vla-gym assets download (at most "
            f"{HUB_REPO_SIZE / 1e6:.0f} MB). To keep the lite pack without this warning: "
            "assets='lite'.",
            AssetWarning,
            stacklevel=3,
        )
    return pack


def _pack_at(path: Path, what: str, advice: str) -> AssetPack:
    """Return the pack in a folder, or raise an AssetError that says what is wrong with it."""
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise AssetError(
            f"{what}: expected a folder with LIBERO's assets, but {path} {state}. {advice}"
        )
    from vla_gym.assets.lite.generate import damaged_files, read_manifest

    manifest = read_manifest(path)
    if manifest is not None:
        if damaged := damaged_files(path, manifest):
            raise AssetError(
                f"{what}: {path} is a generated lite pack, but {', '.join(damaged)} is not as it "
                "was written. Give 'lite' to have the pack written again."
            )
        return AssetPack("lite", path, manifest["digest"])
    root, missing = best_root(path)
    if missing:
        raise AssetError(
            f"{what}: expected a complete asset folder, but {root} lacks {len(missing)} of "
            f"{len(libero_files())} files ({shorten(missing)}). {advice}"
        )
    return AssetPack("libero", root, pack_digest(root))
