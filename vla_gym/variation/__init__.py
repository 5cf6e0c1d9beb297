"""Domain variation: light, cameras, colours and clutter that change from episode to episode."""

from vla_gym.variation.config import DomainVariation
from vla_gym.variation.drawn import VARIATION_WIDTH

__all__ = ["VARIATION_WIDTH", "DomainVariation"]
