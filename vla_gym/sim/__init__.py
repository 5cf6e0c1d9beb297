"""Simulation layer: the only part of the package that calls MuJoCo."""

from vla_gym.sim.libero_sim import LiberoSim
from vla_gym.sim.renderer import SceneRenderer
from vla_gym.sim.snapshot import Snapshot

__all__ = ["LiberoSim", "SceneRenderer", "Snapshot"]
