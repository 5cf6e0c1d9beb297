"""A small model with everything that LIBERO's scenes show: meshes, mirror, textures, glass, sky."""

from __future__ import annotations

import mujoco
import numpy as np

_TEMPLATE = """
<mujoco>
  <visual>
    <map znear="0.005" zfar="30"/>
    <quality offsamples="4" shadowsize="256"/>
    <headlight diffuse="0.4 0.4 0.4"/>
  </visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.3 0.5 0.7" rgb2="0 0 0"
      width="64" height="384"/>
    <texture name="check" type="2d" builtin="checker" rgb1="0.2 0.3 0.4" rgb2="0.9 0.8 0.7"
      width="64" height="64"/>
    <texture name="cube" type="cube" builtin="flat" mark="cross" rgb1="0.6 0.4 0.3"
      rgb2="0.2 0.6 0.3" markrgb="1 1 1" width="32" height="192"/>
    <material name="floor" texture="check" texrepeat="4 4" texuniform="true"/>
    <material name="wood" texture="check" texrepeat="2 3"/>
    <material name="painted" texture="cube"/>
    <material name="shiny" texture="cube" reflectance="0.5" specular="0.9" shininess="0.8"/>
    <material name="second_mirror" reflectance="0.7" emission="0.3"/>
    <material name="plain" specular="0.2" shininess="0.1"/>
    <mesh name="smooth" vertex="{smooth_vertices}" face="{smooth_faces}"/>
    <mesh name="mapped" vertex="{mapped_vertices}" face="{mapped_faces}" texcoord="{texcoord}"/>
    <mesh name="spiky" vertex="{spiky_vertices}" face="{spiky_faces}"/>
  </asset>
  <default><geom group="1"/></default>
  <worldbody>
    <light type="spot" pos="1 1 4" dir="-0.2 -0.3 -1" castshadow="{shadow}"/>
    <light type="directional" pos="0 0 4" dir="0.3 -0.1 -1" castshadow="{shadow}"/>
    <camera name="front" pos="1.2 0.1 0.9" xyaxes="0 1 0 -0.6 0 1"/>
    <geom name="floor" type="plane" size="{floor} 0.125" material="floor"/>
    <geom name="wall" type="box" size="0.02 2 1" pos="-1.5 0 1" material="wood"/>
    <geom name="table" type="box" size="0.5 0.6 0.02" pos="0 0 0.4" material="painted"/>
    <geom name="leg" type="cylinder" size="0.02 0.19" pos="0.4 0.4 0.19" rgba="0.4 0.3 0.2 1"/>
    <geom name="base" type="mesh" mesh="spiky" pos="-0.7 0 0.2" rgba="0.3 0.3 0.3 1"/>
    <geom name="stove" type="box" size="0.15 0.15 0.02" pos="0.1 -0.2 0.44" material="shiny"/>
    <geom name="other" type="box" size="0.1 0.1 0.02" pos="0.2 0.3 0.44" material="second_mirror"/>
    <site name="mark" type="sphere" size="0.03" pos="0 0 0.7" rgba="1 0 0 -1"/>
    <body name="arm" pos="-0.2 0 0.6">
      <joint name="turn" type="hinge" axis="0 0 1" range="-2 2" limited="true"/>
      <geom type="capsule" size="0.04" fromto="0 0 0 0.3 0 0.1" material="plain"/>
      <geom type="mesh" mesh="smooth" pos="0.3 0 0.1" rgba="0.9 0.9 0.9 1"/>
      <camera name="hand" pos="0.35 0 0.2" xyaxes="0 1 0 -1 0 0.3" fovy="75"/>
    </body>
    <body pos="0.1 0.1 0.5"><freejoint/>
      <geom type="mesh" mesh="mapped" material="wood" mass="0.1"/></body>
    <body pos="-0.1 0.2 0.5"><freejoint/>
      <geom type="mesh" mesh="smooth" rgba="0.2 0.5 0.9 0.4" mass="0.1"/></body>
    <body pos="0.2 -0.3 0.6"><freejoint/>
      <geom type="ellipsoid" size="0.05 0.03 0.08" rgba="0.8 0.7 0.2 0.6" mass="0.1"/></body>
    <body pos="0.1 -0.2 0.6"><freejoint/>
      <geom type="sphere" size="0.04" material="painted" mass="0.1"/></body>
  </worldbody>
</mujoco>
"""


def _sphere(rows: int, columns: int, radius: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return vertices (rows * columns + 2, 3) and faces of a sphere; ``radius`` one a vertex."""
    polar = np.linspace(0, np.pi, rows + 2)[1:-1]
    angle = np.linspace(0, 2 * np.pi, columns, endpoint=False)
    ring = np.stack(
        [
            np.outer(np.sin(polar), np.cos(angle)),
            np.outer(np.sin(polar), np.sin(angle)),
            np.outer(np.cos(polar), np.ones(columns)),
        ],
        axis=-1,
    ).reshape(-1, 3)
    vertices = np.concatenate([ring, [[0, 0, 1], [0, 0, -1]]]) * radius[:, None]
    faces = []
    for row in range(rows - 1):
        for column in range(columns):
            a, b = row * columns + column, row * columns + (column + 1) % columns
            c, d = a + columns, b + columns
            faces += [[a, c, b], [b, c, d]]
    top, bottom, last = rows * columns, rows * columns + 1, (rows - 1) * columns
    for column in range(columns):
        after = (column + 1) % columns
        faces += [[top, column, after], [bottom, last + after, last + column]]
    return vertices, np.array(faces)


def toy_model(*, shadow: bool = False, infinite_floor: bool = False) -> mujoco.MjModel:
    """Return the compiled model."""
    rng = np.random.default_rng(0)
    count = 40 * 40 + 2
    smooth = _sphere(40, 40, np.full(count, 0.06))
    mapped = _sphere(40, 40, 0.05 * (1 + 0.02 * rng.normal(size=count)))
    spiky = _sphere(40, 40, 0.2 * (1 + 0.2 * rng.random(count)))
    text = {
        f"{name}_{part}": " ".join(f"{value:.6g}" for value in array.ravel())
        for name, mesh in (("smooth", smooth), ("mapped", mapped), ("spiky", spiky))
        for part, array in zip(("vertices", "faces"), mesh, strict=True)
    }
    texcoord = " ".join(f"{value:.5g}" for value in rng.random(2 * count))
    return mujoco.MjModel.from_xml_string(
        _TEMPLATE.format(
            **text,
            texcoord=texcoord,
            shadow=str(shadow).lower(),
            floor="0 0" if infinite_floor else "3 3",
        )
    )
