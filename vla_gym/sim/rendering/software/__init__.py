"""A painter for software OpenGL (Mesa's llvmpipe): the pixels of MuJoCo's, in a quarter of the time.

What it buys: TODO
"""

from vla_gym.sim.rendering.software.painter import SoftwarePainter, can_draw, preload

__all__ = ["SoftwarePainter", "can_draw", "preload"]
