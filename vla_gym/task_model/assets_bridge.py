"""Temporary: the real resolver is vla_gym.assets, used when it exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vla_gym.errors import AssetError


@dataclass(frozen=True)
class AssetPack:
    """Name, folder and digest of an asset pack."""

    name: str
    root: Path
    digest: str


def cache_dir() -> Path:
    """Return the cache folder."""
    return Path(os.environ.get("VLA_GYM_CACHE", Path.home() / ".cache" / "vla-gym"))


def resolve_asset_pack(assets: str | Path = "lite") -> AssetPack:
    """Find a pack."""
    root = cache_dir() / "libero-assets" if assets == "libero" else Path(assets)
    if not root.is_dir():
        raise AssetError(f"No asset folder at {root}")
    return AssetPack("libero", root, "dev")


try:
    from vla_gym.assets import AssetPack, cache_dir, resolve_asset_pack  # type: ignore # noqa
except ImportError:
    pass
