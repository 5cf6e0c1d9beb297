"""The example that makes points of depth: where they are, and the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
