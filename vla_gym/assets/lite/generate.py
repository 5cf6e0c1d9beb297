"""Write the lite pack into a folder, once per version of its source."""

from __future__ import annotations

import hashlib
import json
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from vla_gym.assets.cache import make_shared
from vla_gym.assets.lite import (
    books,
    bottles,
    boxes,
    cabinets,
    caddies,
    cans,
    cartons,
    containers,
    cookware,
    microwaves,
    mugs,
    rings,
    rooms,
    sauces,
    scenes,
    shelves,
    stoves,
    wine_racks,
)
from vla_gym.assets.lite.mjcf import to_text
from vla_gym.assets.manifest import damaged_files
from vla_gym.errors import AssetError, ConfigError
from vla_gym.files import only_process
from vla_gym.outside import Text, read_json

MANIFEST = "lite_pack.json"

# Each writes the file of its name: in a folder of that name, of the collections named here.
_OBJECTS: dict[str, tuple[Callable[[], ET.Element], ...]] = {
    "stable_hope_objects": (
        cans.alphabet_soup,
        sauces.bbq_sauce,
        boxes.butter,
        boxes.chocolate_pudding,
        boxes.cookies,
        boxes.cream_cheese,
        sauces.ketchup,
        cartons.milk,
        sauces.new_salad_dressing,
        cartons.orange_juice,
        sauces.salad_dressing,
        cans.tomato_sauce,
    ),
    "stable_scanned_objects": (
        rings.akita_black_bowl,
        containers.basket,
        cookware.chefmate_8_frypan,
        rings.glazed_rim_porcelain_ramekin,
        rings.plate,
        rings.white_bowl,
    ),
    "turbosquid_objects": (
        books.black_book,
        caddies.desk_caddy,
        cookware.moka_pot,
        mugs.porcelain_mug,
        mugs.red_coffee_mug,
        mugs.white_yellow_mug,
        bottles.wine_bottle,
        wine_racks.wine_rack,
        containers.wooden_tray,
        shelves.wooden_two_layer_shelf,
        books.yellow_book,
    ),
}
_FIXTURES = (
    stoves.flat_stove,
    microwaves.microwave,
    cabinets.white_cabinet,
    cabinets.wooden_cabinet,
)
_ARENAS = (
    rooms.libero_floor_base_style,
    rooms.libero_kitchen_tabletop_base_style,
    rooms.libero_living_room_tabletop_base_style,
    rooms.libero_study_base_style,
    scenes.libero_tabletop_base_style,
)

#: What makes each MJCF file, by its path.
GENERATORS: dict[str, Callable[[], ET.Element]] = {
    **{
        f"{folder}/{make.__name__}/{make.__name__}.xml": make
        for folder, makers in _OBJECTS.items()
        for make in makers
    },
    **{f"articulated_objects/{make.__name__}.xml": make for make in _FIXTURES},
    **{f"scenes/{make.__name__}.xml": make for make in _ARENAS},
}


def pack_files() -> dict[str, bytes]:
    """Return every file of the pack, by path relative to its root."""
    files = {path: to_text(make()).encode() for path, make in GENERATORS.items()}
    return files | scenes.textures()


def source_digest() -> str:
    """Return the digest of the generator's source files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def ensure_lite_pack(parent: Path) -> tuple[Path, str]:
    """Return the generated pack, writing it first if it is not there or damaged.

    The pack is written into a temporary folder and renamed, under a lock: several processes may do
    this at once, and none ever sees half a pack.

    Args:
        parent: Folder for the packs; created if needed.

    Returns:
        The pack's root folder and its digest.

    Raises:
        AssetError: If the folder cannot be written.
    """
    digest = source_digest()
    root = parent / f"lite-{digest[:16]}"
    if _intact(root, digest):
        return root, digest
    lock = parent / f"{root.name}.lock"
    busy = f"another process has held {lock} for more than a minute"
    try:
        make_shared(parent)
        with only_process(lock, busy, 60.0, TimeoutError):
            if not _intact(root, digest):  # nobody else has been at it
                with tempfile.TemporaryDirectory(prefix=".lite-", dir=parent) as scratch:
                    write_pack(Path(scratch, "pack"), digest)
                    if root.exists():
                        root.rename(Path(scratch, "damaged"))
                    Path(scratch, "pack").rename(root)
    except OSError as error:
        raise AssetError(
            f"The lite asset pack cannot be written to {root}: {error}. Make that folder "
            "writable or point the environment variable VLA_GYM_CACHE to one that is."
        ) from error
    return root, digest


def write_pack(root: Path, digest: str) -> None:
    """Write all files and the manifest into a folder that does not exist yet."""
    sums = {}
    for relative, data in pack_files().items():
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sums[relative] = hashlib.sha256(data).hexdigest()
    manifest = {"name": "lite", "digest": digest, "files": sums}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


class Manifest(Struct):
    """Of a generated pack; ``files`` have their SHA-256."""

    name: Literal["lite"]
    digest: str
    files: dict[Text, str]


def read_manifest(root: Path) -> Manifest | None:
    """Return the manifest of a generated pack, or None if the folder is not one."""
    try:
        return read_json(root / MANIFEST, Manifest)
    except ConfigError:
        return None


def _intact(root: Path, digest: str) -> bool:
    """Tell whether a folder holds this version's pack, byte for byte as it was written."""
    manifest = read_manifest(root)
    return (
        manifest is not None
        and manifest.digest == digest
        and bool(manifest.files)
        and not damaged_files(root, manifest.files)
    )
