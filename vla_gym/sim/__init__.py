"""Simulation layer: the only part of the package that calls MuJoCo."""

from pathlib import Path

from vla_gym.preflight import check_egl, ensure_numba_cache

check_egl()  # before MuJoCo is imported
# Before the first compiled function: numba looks for its folder when it sees one.
ensure_numba_cache(Path(__file__).parent)

from vla_gym.sim.libero_sim import LiberoSim  # noqa: E402
from vla_gym.sim.rendering.renderer import SceneRenderer  # noqa: E402
from vla_gym.sim.snapshot import Snapshot  # noqa: E402

__all__ = ["LiberoSim", "SceneRenderer", "Snapshot"]
