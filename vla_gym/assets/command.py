"""``vla-gym assets``: what packs there are; check and locate them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

from tyro.conf import Positional

from vla_gym.assets.manifest import present_files, shorten
from vla_gym.assets.pack import resolve_asset_pack, verify_pack
from vla_gym.errors import AssetError

Action = Literal["status", "verify", "path"]


@dataclass
class AssetsConfig:
    """Show, check or locate the asset packs.

    status: which packs are there. verify: read every file of a pack. path: print a pack's folder.
    """

    action: Positional[Action] = "status"
    """What to do."""
    pack: Literal["libero", "lite"] = "libero"
    """The pack that verify and path are about."""
    json: bool = False
    """Print status as JSON."""


def run(config: AssetsConfig) -> int:
    """Do it; return the exit status: 0, or 1 if verify found a problem.

    Raises:
        AssetError: If the pack is missing or damaged.
    """
    if config.action == "status":
        return _status(config.json)
    pack = resolve_asset_pack(config.pack)
    if config.action == "path":
        sys.stdout.write(f"{pack.root}\n")
        return 0
    # Resolving the lite pack has checked every file of it.
    if pack.name == "libero" and (changed := verify_pack(pack)):
        sys.stdout.write(f"problem: {len(changed)} files are not LIBERO's: {shorten(changed)}\n")
        return 1
    count = f"{len(present_files(pack.root))} files" if pack.name == "libero" else "every file"
    sys.stdout.write(f"{pack.name}: {count} as published, digest {pack.digest[:16]}\n")
    return 0


def _status(as_json: bool) -> int:
    """Write a row for each pack: pack and state, with root and digest if it is ready."""
    rows: list[dict[str, Any]] = []
    for name in ("lite", "libero"):
        try:
            pack = resolve_asset_pack(name)
        except AssetError as error:
            rows.append({"pack": name, "state": "absent", "reason": str(error)})
            continue
        row = {"pack": name, "state": "ready", "root": str(pack.root), "digest": pack.digest}
        rows.append(row)
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    for row in rows:
        if row["state"] == "ready":
            text = f"{row['root']}\n    digest: {row['digest'][:16]}"
        else:
            text = row["reason"]
        sys.stdout.write(f"{row['pack']}: {row['state']}\n    {text}\n")
    return 0
