"""The embedded VLA: a policy of a few million parameters that runs anywhere."""

from vla_gym.vla.base import GRIPPER
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import (
    MiniVLA,
    MiniVLAConfig,
    MiniVLAOutput,
    load_model,
    to_pixel_values,
)

__all__ = [
    "GRIPPER",
    "MiniBackend",
    "MiniVLA",
    "MiniVLAConfig",
    "MiniVLAOutput",
    "load_model",
    "to_pixel_values",
]
