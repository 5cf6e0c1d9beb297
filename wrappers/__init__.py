"""Gymnasium wrappers of vla_gym; import them as ``vla_gym.wrappers``."""

from vla_gym.wrappers.action_chunk import ActionChunk
from vla_gym.wrappers.frozen_vla import FrozenVLAObservation
from vla_gym.wrappers.history import History
from vla_gym.wrappers.plain_spaces import PlainSpaces

__all__ = ["ActionChunk", "FrozenVLAObservation", "History", "PlainSpaces"]
