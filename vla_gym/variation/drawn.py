"""What was drawn for an episode: one flat vector of numbers, the same width for all scenes.

The vector says all: with the task, it decides every pixel. It is what infos report, what saved
states carry, and what a simulation shows.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from vla_gym.errors import ConfigError

AGENT_CAMERA, WRIST_CAMERA = "agentview", "robot0_eye_in_hand"
#: Colours for the objects and fixtures of a scene, in the order of ``TaskModel.objects``.
MAX_OBJECTS = 16
MAX_DISTRACTORS = 6
#: What clutter may be, small things that stand by themselves; a scene takes what it does not use.
CLUTTER_KINDS = (
    "red_coffee_mug",
    "chocolate_pudding",
    "orange_juice",
    "glazed_rim_porcelain_ramekin",
    "tomato_sauce",
    "cookies",
    "butter",
    "milk",
    "cream_cheese",
    "alphabet_soup",
    "bbq_sauce",
    "ketchup",
    "porcelain_mug",
    "white_yellow_mug",
)
#: Bodies of clutter in a scene, of which an episode shows some.
NUM_CLUTTER = 8
CLUTTER_KIND, CLUTTER_X, CLUTTER_Y, CLUTTER_YAW = range(4)

# Name and shape of each part, in order; units in the documentation of DomainVariation.describe.
PARTS: dict[str, tuple[int, ...]] = {
    "light_intensity": (),
    "light_color": (3,),
    "light_turn": (),
    "camera_position": (3,),
    "camera_rotation": (3,),
    "camera_fov": (),
    "wrist_position": (3,),
    "wrist_rotation": (3,),
    "table_color": (4,),
    "floor_color": (4,),
    "wall_color": (4,),
    "object_weight": (),
    "object_colors": (MAX_OBJECTS, 3),
    "distractors": (MAX_DISTRACTORS, 4),
}


_ENDS = list(accumulate(int(np.prod(shape, dtype=int)) for shape in PARTS.values()))
SLICES = {name: slice(a, b) for name, a, b in zip(PARTS, [0, *_ENDS], _ENDS, strict=False)}
#: Length of the vector.
VARIATION_WIDTH = _ENDS[-1]


def plain_vector() -> np.ndarray:
    """Return float64 (VARIATION_WIDTH,): nothing varied."""
    vector = np.zeros(VARIATION_WIDTH)
    vector[SLICES["light_intensity"]] = vector[SLICES["light_color"]] = 1.0
    part(vector, "distractors")[:, CLUTTER_KIND] = -1.0
    return vector


def part(vector: np.ndarray, name: str) -> np.ndarray:
    """Return a part of a vector in its shape, as a view."""
    return vector[SLICES[name]].reshape(PARTS[name])


def check_vector(vector: np.ndarray) -> np.ndarray:
    """Return a vector as float64.

    Raises:
        ConfigError: If it has another shape, a value that is not finite, or clutter of no kind.
    """
    array = np.asarray(vector)
    if array.shape != (VARIATION_WIDTH,) or array.dtype.kind not in "fiu":
        raise ConfigError(
            f"Expected info['variation'] of one environment, {VARIATION_WIDTH} numbers; got shape "
            f"{array.shape} of {array.dtype}."
        )
    if not np.isfinite(array).all():
        raise ConfigError("A variation holds numbers that are not finite.")
    kinds = part(array, "distractors")[:, CLUTTER_KIND]
    if kinds.max() >= len(CLUTTER_KINDS):
        raise ConfigError(
            f"Expected kinds of clutter below {len(CLUTTER_KINDS)}, got {kinds}: is this another "
            "version's vector?"
        )
    return array.astype(np.float64)
