"""A painter for software OpenGL (Mesa's llvmpipe) that draws MuJoCo's pixels in less time.

What it buys, in 2,200 lines: on LIBERO's meshes two images of 256 x 256 take 72 ms instead of 257
(3.5 times as fast, 33,000 of 253,000 triangles drawn) and 300 MB less memory a scene; on the lite
pack, whose meshes are small, 1.2 times as fast at 128 x 128 (CPU time, benchmarks/bench_render.py
on two cores). On a GPU MuJoCo's own renderer is fast: this folder is not even imported there. All
pixels are equal, by test. If software rendering is of no use to you, delete the folder and its two
uses in :mod:`vla_gym.sim.rendering.painter`.
"""

from vla_gym.sim.rendering.software.painter import SoftwarePainter, can_draw, preload

__all__ = ["SoftwarePainter", "can_draw", "preload"]
