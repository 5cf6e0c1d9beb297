"""The example that makes points of depth: where they are, and the files."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from examples import point_cloud


def test_the_example_writes_points_that_are_where_the_simulation_has_them(tmp_path: Path) -> None:
    assert point_cloud.main(tmp_path / "new", assets="lite") < 0.002
    header, _, body = (tmp_path / "new" / "points.ply").read_bytes().partition(b"end_header\n")
    fields = [(axis, "<f4") for axis in "xyz"] + [(colour, "u1") for colour in "rgb"]
    points = np.frombuffer(body, fields)
    assert f"element vertex {len(points)}\n".encode() in header and 40_000 < len(points) < 65_536
    # Most of what the camera sees is the table itself, which is not grey or black.
    height = np.median(points["z"])
    assert abs(height - point_cloud.TABLE_TOP) < 0.002
    table = points[np.abs(points["z"] - height) < 0.002]
    assert np.median(table["r"]) > np.median(table["b"]) + 30
    for axis, reach in (("x", 0.5), ("y", 0.6)):
        assert np.abs(points[axis]).max() <= reach + 1e-6
    assert Image.open(tmp_path / "new" / "points.png").size == (1300, 450)


def test_objects_of_both_cameras() -> None:
    options = {"depth": True, "segmentation": True, "image_size": 256, "assets": "lite"}
    env = gym.make("Libero-goal-v0", task_ids=8, **options).unwrapped
    obs, _ = env.reset(seed=1)
    for _ in range(6):  # down, so that the wrist sees the bowl whole
        obs, *_ = env.step(np.array([0, 0, -0.3, 0, 0, 0, -1], np.float32))
    bodies = np.array([*env.geom_bodies(), ""])
    for camera in ("agentview", "wrist"):
        bowl = bodies[obs[f"{camera}_segmentation"]] == "akita_black_bowl_1_main"
        seen = point_cloud.point_cloud(env, obs, camera)[bowl]
        corners = env.sim.collision_corners("akita_black_bowl_1_main")
        assert len(seen) > 500
        inside = ((seen > corners.min(0) - 0.005) & (seen < corners.max(0) + 0.005)).all(1)
        assert inside.mean() > 0.99, camera
    with pytest.raises(ValueError, match="does not see nothing_main"):
        point_cloud.offset(env, obs, "agentview", "nothing_main")
    env.close()
