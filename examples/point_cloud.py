"""Coloured points in the world from depth and a camera's matrices: a .ply file and a picture."""

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib as mpl
import numpy as np

mpl.use("Agg")  # a file, no window
import matplotlib.pyplot as plt  # noqa: E402

import vla_gym  # noqa: E402, F401  (registers the environments)

TABLE_TOP = 0.9  # m; the middle of the table is at x = y = 0
PLATE = "plate_1_main"  # flat and round, so what is seen of it is around its centre


def point_cloud(env: Any, obs: dict[str, Any], camera: str) -> np.ndarray:
    """Return where in the world each pixel of a camera is, (H, W, 3) in metres."""
    depth = obs[f"{camera}_depth"]
    rows, columns = np.indices(depth.shape) + 0.5  # the centres of the pixels
    pixels = np.stack([columns, rows, np.ones(depth.shape)], axis=-1)
    rays = pixels @ np.linalg.inv(env.camera_intrinsics(camera)).T
    to_world = np.linalg.inv(env.camera_extrinsics(camera))
    return (rays * depth[..., None]) @ to_world[:3, :3].T + to_world[:3, 3]


def offset(env: Any, obs: dict[str, Any], camera: str, body: str) -> float:
    """Return how far a body is from the median of its points, over the table, in metres."""
    bodies = np.array([*env.geom_bodies(), ""])  # the last one is that of -1: nothing
    points = point_cloud(env, obs, camera)[bodies[obs[f"{camera}_segmentation"]] == body]
    if not len(points):
        raise ValueError(f"{camera} does not see {body}.")
    return float(np.linalg.norm((np.median(points, axis=0) - env.sim.body_pos(body))[:2]))


def write_ply(file: Path, points: np.ndarray, colours: np.ndarray) -> None:
    """Write points (N, 3) and their colours (N, 3) uint8 for MeshLab, Open3D, Blender..."""
    fields = [(axis, "<f4") for axis in "xyz"] + [(c, "u1") for c in ("red", "green", "blue")]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}"]
    header += [f"property {'float' if t == '<f4' else 'uchar'} {name}" for name, t in fields]
    rows = np.empty(len(points), fields)
    for k, (name, _) in enumerate(fields):
        rows[name] = points[:, k] if k < 3 else colours[:, k - 3]
    file.write_bytes("\n".join([*header, "end_header", ""]).encode() + rows.tobytes())


def draw(file: Path, image: np.ndarray, points: np.ndarray, colours: np.ndarray) -> None:
    """Draw the camera's image, and the points from the front and from above."""
    figure = plt.figure(figsize=(13, 4.5))
    figure.add_subplot(1, 3, 1, title="what the camera sees").imshow(image)
    for place, title, view in ((2, "the points", (25, 20)), (3, "from above", (90, 0))):
        axes: Any = figure.add_subplot(1, 3, place, projection="3d", title=title)
        axes.scatter(*points.T, c=colours / 255, s=1)
        heights = [] if title == "from above" else [TABLE_TOP, 1.1]
        axes.set(xlabel="x (m)", ylabel="y (m)", zticks=heights, aspect="equal")
        axes.view_init(*view)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    plt.close(figure)


def main(out: Path, camera: str = "agentview", **options: Any) -> float:
    """Write the files into a folder; return by how much the plate is off, in metres."""
    options = {"image_size": 256, "depth": True, "segmentation": True} | options
    env: Any = gym.make("Libero-goal-v0", task_ids=8, **options).unwrapped
    obs, _ = env.reset(seed=0)
    points = point_cloud(env, obs, camera)
    x, y, z = np.moveaxis(points, -1, 0)
    table = (abs(x) < 0.5) & (abs(y) < 0.6) & (abs(z - TABLE_TOP - 0.2) < 0.22)
    out.mkdir(parents=True, exist_ok=True)
    write_ply(out / "points.ply", points[table], obs[camera][table])
    draw(out / "points.png", obs[camera], points[table], obs[camera][table])
    off = offset(env, obs, camera, PLATE)
    env.close()
    print(f"{out}: {table.sum()} points; those of {PLATE} are off by {1000 * off:.1f} mm")
    if off > 0.005:
        raise SystemExit("The points are not where the simulation has the plate.")
    return off


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("point_cloud"))
    parser.add_argument("--assets", default="lite", help="lite, libero or a path")
    args = parser.parse_args()
    main(args.out, assets=args.assets)
