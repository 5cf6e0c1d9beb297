"""The movable objects that only other suites than libero_goal use, by their files' paths."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

from vla_gym.assets.lite import (
    books,
    boxes,
    cans,
    cartons,
    containers,
    cookware,
    mugs,
    rings,
    sauces,
)

_FOLDERS: dict[str, tuple[Callable[[], ET.Element], ...]] = {
    "stable_hope_objects": (
        cans.alphabet_soup,
        sauces.bbq_sauce,
        boxes.butter,
        boxes.chocolate_pudding,
        boxes.cookies,
        sauces.ketchup,
        cartons.milk,
        sauces.new_salad_dressing,
        cartons.orange_juice,
        sauces.salad_dressing,
        cans.tomato_sauce,
    ),
    "stable_scanned_objects": (
        containers.basket,
        cookware.chefmate_8_frypan,
        rings.glazed_rim_porcelain_ramekin,
        rings.white_bowl,
    ),
    "turbosquid_objects": (
        books.black_book,
        cookware.moka_pot,
        mugs.porcelain_mug,
        mugs.red_coffee_mug,
        mugs.white_yellow_mug,
        containers.wooden_tray,
        books.yellow_book,
    ),
}

GENERATORS: dict[str, Callable[[], ET.Element]] = {
    f"{folder}/{make.__name__}/{make.__name__}.xml": make
    for folder, makers in _FOLDERS.items()
    for make in makers
}

#: Objects whose own y axis is up when they stand, as LIBERO's samplers place them; the others' z.
Y_UP = frozenset(
    "alphabet_soup ketchup milk new_salad_dressing orange_juice salad_dressing tomato_sauce".split()
)
