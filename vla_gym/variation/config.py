"""How much scenes vary: the argument ``variation`` of the environments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import numpy as np
from msgspec import Meta

from vla_gym.errors import ConfigError
from vla_gym.outside import Fraction, to_type
from vla_gym.variation.drawn import (
    CLUTTER_KIND,
    CLUTTER_KINDS,
    MAX_DISTRACTORS,
    PARTS,
    check_vector,
    part,
    plain_vector,
)

# Sets these random streams apart from those of tasks and layouts: no episode number is as large.
_VARIATION_TAG = 0x7A21A7E5
_LIGHT, _CAMERA, _SURFACES, _OBJECTS, _DISTRACTORS = range(5)
# Darkest channel of a drawn colour: nothing becomes black.
_DARKEST = 0.15


@dataclass(frozen=True)
class DomainVariation:
    """How far the look of a scene may stray from LIBERO's; every field is 0 (off) by default.

    An environment draws anew every ``scene_reset_interval`` episodes. Light, cameras and colours
    change images only; distractors are solid. Each group of fields has random numbers of its own:
    turning one on leaves what the others draw as it is.

    Raises:
        ConfigError: If a field is out of its range.
    """

    light_intensity: Annotated[float, Meta(ge=0.0, le=0.8)] = 0.0
    """All lights are multiplied by a factor in 1 - x .. 1 + x; x in 0..0.8."""
    light_color: Annotated[float, Meta(ge=0.0, le=0.8)] = 0.0
    """Red, green and blue of all lights are each multiplied by a factor in 1 - x .. 1; 0..0.8."""
    light_direction: Annotated[float, Meta(ge=0.0, le=180.0)] = 0.0
    """All lights are turned about the vertical through the scene by up to x degrees; 0..180."""
    camera_position: Annotated[float, Meta(ge=0.0, le=0.3)] = 0.0
    """The agent's camera is moved by up to x metres in any direction; 0..0.3."""
    camera_rotation: Annotated[float, Meta(ge=0.0, le=20.0)] = 0.0
    """The agent's camera is turned by up to x degrees about any axis; 0..20."""
    camera_fov: Annotated[float, Meta(ge=0.0, le=15.0)] = 0.0
    """The vertical field of view of the agent's camera changes by up to x degrees; 0..15."""
    wrist_position: Annotated[float, Meta(ge=0.0, le=0.03)] = 0.0
    """The wrist camera is moved in its mount by up to x metres in any direction; 0..0.03."""
    wrist_rotation: Annotated[float, Meta(ge=0.0, le=15.0)] = 0.0
    """The wrist camera is turned in its mount by up to x degrees about any axis; 0..15."""
    table_color: Fraction = 0.0
    """The table's colour is (1 - x) of its own and x of a drawn one; 0..1. Textures stay."""
    floor_color: Fraction = 0.0
    """The same for the floor."""
    wall_color: Fraction = 0.0
    """The same for walls and what stands before them."""
    object_color: Fraction = 0.0
    """The same for objects and fixtures, a colour each."""
    distractors: Annotated[int, Meta(ge=0, le=MAX_DISTRACTORS)] = 0
    """Objects of other categories that stand about; 0..6. Fewer where a scene lacks the room."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            value = value.item() if isinstance(value, np.generic) else value
            object.__setattr__(self, name, to_type(value, hint, name))

    @classmethod
    def preset(cls, name: str) -> DomainVariation:
        """Return a named level: ``"none"``, ``"mild"`` or ``"strong"``.

        Raises:
            ConfigError: If there is no such level.
        """
        if name not in _PRESETS:
            known = ", ".join(repr(level) for level in _PRESETS)
            raise ConfigError(
                f"There is no variation {name!r}: expected one of {known}, or a "
                "vla_gym.DomainVariation."
            )
        return cls(**_PRESETS[name])

    @classmethod
    def parse(cls, value: DomainVariation | str | None) -> DomainVariation | None:
        """Return what the argument ``variation`` of an environment means; None: nothing varies.

        Raises:
            ConfigError: If it is no level and no ``DomainVariation``.
        """
        if isinstance(value, str):
            value = cls.preset(value)
        if value is not None and not isinstance(value, cls):
            raise ConfigError(
                "variation must be None, the name of a level or a vla_gym.DomainVariation, got "
                f"{type(value).__name__}."
            )
        return value if value is not None and any(dataclasses.astuple(value)) else None

    def draw(self, key_seed: int, number: int, sim: Any) -> np.ndarray:
        """Draw a variation; it depends on the arguments alone.

        Args:
            key_seed: Seed of the environment or of its group.
            number: Number of the variation: episode // scene_reset_interval.
            sim: The suite's simulation, which knows where its scene has room for distractors.

        Returns:
            float64 (VARIATION_WIDTH,).
        """
        vector = plain_vector()
        rngs = [np.random.default_rng([key_seed, _VARIATION_TAG, number, i]) for i in range(5)]
        rng = rngs[_LIGHT]
        part(vector, "light_intensity")[...] = 1.0 + self.light_intensity * rng.uniform(-1, 1)
        part(vector, "light_color")[:] = 1.0 - self.light_color * rng.random(3)
        part(vector, "light_turn")[...] = self.light_direction * rng.uniform(-1, 1)
        rng = rngs[_CAMERA]
        part(vector, "camera_position")[:] = self.camera_position * _in_ball(rng)
        part(vector, "camera_rotation")[:] = self.camera_rotation * _in_ball(rng)
        part(vector, "camera_fov")[...] = self.camera_fov * rng.uniform(-1, 1)
        part(vector, "wrist_position")[:] = self.wrist_position * _in_ball(rng)
        part(vector, "wrist_rotation")[:] = self.wrist_rotation * _in_ball(rng)
        for name in ("table_color", "floor_color", "wall_color"):
            colour = part(vector, name)
            colour[:3], colour[3] = rngs[_SURFACES].uniform(_DARKEST, 1, 3), getattr(self, name)
        colours = part(vector, "object_colors")
        colours[:] = rngs[_OBJECTS].uniform(_DARKEST, 1, colours.shape)
        part(vector, "object_weight")[...] = self.object_color
        if self.distractors:
            rows = sim.place_distractors(self.distractors, rngs[_DISTRACTORS])
            part(vector, "distractors")[:] = rows
        return vector

    @staticmethod
    def describe(vector: np.ndarray) -> dict[str, Any]:
        """Return the numbers of ``info["variation"]`` by name.

        Args:
            vector: Of one environment; a row of a vector environment's array.

        Returns:
            ``light_intensity`` (factor); ``light_color`` (3,) factors of red, green, blue;
            ``light_turn`` in degrees; ``camera_position`` (3,) in metres along the world's axes;
            ``camera_rotation`` (3,) degrees about the camera's right, up and backward axis;
            ``camera_fov`` degrees; ``wrist_position`` (3,) in metres in the hand's frame;
            ``wrist_rotation`` (3,); ``table_color``, ``floor_color``, ``wall_color``: (4,) red,
            green, blue and the weight of this colour; ``object_weight`` and ``object_colors``
            (16, 3) of the scene's objects, then fixtures; ``distractors``: a list of (category, x,
            y, turn in degrees), metres in the world frame.

        Raises:
            ConfigError: If it is not such a vector.
        """
        vector = check_vector(vector)
        found: dict[str, Any] = {}
        for name, shape in PARTS.items():
            values = part(vector, name)
            found[name] = values.copy() if shape else float(values)
        found["distractors"] = [
            (CLUTTER_KINDS[int(row[CLUTTER_KIND])], *(float(v) for v in row[1:]))
            for row in found["distractors"]
            if row[CLUTTER_KIND] >= 0
        ]
        return found


def _in_ball(rng: np.random.Generator) -> np.ndarray:
    """Return a point of the ball of radius 1, (3,), uniform over its volume."""
    direction = rng.standard_normal(3)
    return np.asarray(direction / np.linalg.norm(direction) * rng.random() ** (1 / 3))


_PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "mild": {
        "light_intensity": 0.2,
        "light_color": 0.1,
        "light_direction": 45.0,
        "camera_position": 0.02,
        "camera_rotation": 2.0,
        "camera_fov": 1.0,
        "wrist_position": 0.003,
        "wrist_rotation": 1.0,
        "table_color": 0.25,
        "floor_color": 0.35,
        "wall_color": 0.35,
        "object_color": 0.1,
        "distractors": 2,
    },
    "strong": {
        "light_intensity": 0.4,
        "light_color": 0.3,
        "light_direction": 180.0,
        "camera_position": 0.06,
        "camera_rotation": 5.0,
        "camera_fov": 3.0,
        "wrist_position": 0.008,
        "wrist_rotation": 3.0,
        "table_color": 0.5,
        "floor_color": 0.8,
        "wall_color": 0.8,
        "object_color": 0.25,
        "distractors": 5,
    },
}
