"""Meshes of the profile ``coarse``: fewer triangles, no gaps, the same looks."""

from __future__ import annotations

from collections import Counter

import gymnasium
import numpy as np
import pytest
from render_pairs import PainterPair, fixed_camera

from vla_gym.sim import LiberoSim
from vla_gym.sim.model_io import load_shared
from vla_gym.sim.rendering.renderer import CAMERAS
from vla_gym.sim.rendering.software import preload
from vla_gym.sim.rendering.software.coarse_meshes import CELL, merge_corners
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model

RADIUS = 0.05


def ball(count: int) -> np.ndarray:
    """Return (F, 3, 8) of a sphere; its texture begins and ends at a seam, each pole is one."""
    polar, around = np.meshgrid(np.arange(count + 1), np.arange(2 * count + 1), indexing="ij")
    theta, phi = np.pi * polar / count, np.pi * (around % (2 * count)) / count
    axes = np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], -1)
    texture = np.stack([around / (2 * count), polar / count], -1)
    points = np.concatenate([RADIUS * axes, axes, texture], -1)
    a, b, c, d = points[:-1, :-1], points[1:, :-1], points[1:, 1:], points[:-1, 1:]
    upper, lower = np.stack([a, b, d], 2)[1:], np.stack([b, c, d], 2)[:-1]
    return np.concatenate([upper.reshape(-1, 3, 8), lower.reshape(-1, 3, 8)]).astype(np.float32)


def test_a_ball_stays_a_ball() -> None:
    fine = ball(60)
    coarse = merge_corners(fine)
    assert len(coarse) < len(fine) / 8
    length = np.linalg.norm(coarse[:, :, :3], axis=-1)
    assert RADIUS - CELL < length.min() and length.max() < RADIUS + 1e-6
    normal = coarse[:, :, 3:6]
    np.testing.assert_allclose(np.linalg.norm(normal, axis=-1), 1.0, atol=1e-5)
    outward = (normal * coarse[:, :, :3]).sum(-1) / length
    assert outward.min() > np.cos(2 * CELL / RADIUS)
    texture = coarse[:, :, 6:]
    assert np.ptp(texture[:, :, 0], axis=1).max() < 0.5, "no triangle reaches across the seam"
    at_equator = np.abs(coarse[:, :, 2]) < 0.5 * RADIUS
    phi = np.arctan2(coarse[:, :, 1], coarse[:, :, 0]) / (2 * np.pi) % 1.0
    apart = np.abs((texture[:, :, 0] - phi + 0.5) % 1.0 - 0.5)[at_equator]
    assert apart.max() < CELL / RADIUS / np.pi, "the texture stays where it was"


def test_no_gap_opens() -> None:
    """Each edge is there as often in one direction as in the other."""
    edges: Counter[tuple[bytes, bytes]] = Counter()
    for triangle in merge_corners(ball(60))[:, :, :3]:
        for k in range(3):
            edges[triangle[k].tobytes(), triangle[(k + 1) % 3].tobytes()] += 1
    assert edges and all(edges[b, a] == count for (a, b), count in edges.items())


def test_small_meshes_stay_as_they_are() -> None:
    fine = ball(60)
    assert merge_corners(fine[:999]) is not fine and len(merge_corners(fine[:999])) == 999
    assert len(merge_corners(fine[:1000])) < 1000
    speck = fine * np.float32(0.02)  # within one cell: it must not vanish
    assert merge_corners(speck) is speck


def plate(thickness: float) -> np.ndarray:
    """Return (F, 3, 8) of a square of 16 cm and its back side, which looks down."""
    x, y = np.meshgrid(np.linspace(0, 0.16, 41), np.linspace(0, 0.16, 41), indexing="ij")
    zero, one = np.zeros_like(x), np.ones_like(x)
    points = np.stack([x, y, zero, zero, zero, one, x / 0.16, y / 0.16], -1)
    a, b, c, d = points[:-1, :-1], points[1:, :-1], points[1:, 1:], points[:-1, 1:]
    top = np.concatenate([np.stack([a, b, d], 2), np.stack([b, c, d], 2)]).reshape(-1, 3, 8)
    back = top[:, ::-1].copy()
    back[:, :, 2], back[:, :, 5] = -thickness, -1.0
    return np.concatenate([top, back]).astype(np.float32)


def test_both_sides_of_a_thin_plate_stay_with_their_normals_once_and_in_order() -> None:
    coarse = merge_corners(plate(0.001))
    a, b, c = coarse[:, :, :3].transpose(1, 0, 2)
    up = np.cross(b - a, c - a)[:, 2] > 0
    assert up.sum() == (~up).sum() > 100, "each place is drawn once from each side"
    np.testing.assert_array_equal(coarse[:, :, 5], np.where(up, 1.0, -1.0)[:, None].repeat(3, 1))
    assert up[: up.sum()].all(), "the top came first"
    np.testing.assert_allclose(coarse[:, :, 6:], coarse[:, :, :2] / 0.16, atol=CELL / 0.16 / 2)
    np.testing.assert_allclose(merge_corners(plate(0.001).repeat(2, 0)), coarse, atol=1e-7)


@pytest.mark.libero_assets
def test_environments_draw_coarse_frames_in_workers_too() -> None:
    how = {"task_ids": 8, "assets": "libero", "image_size": 64}
    images = []
    for profile in ("fast", "coarse"):
        env = gymnasium.make("Libero-goal-v0", visual_profile=profile, **how)
        images.append(env.reset(seed=0)[0]["agentview"])
        env.close()
    envs = gymnasium.make_vec(
        "Libero-goal-v0", num_envs=1, workers=1, visual_profile="coarse", **how
    )
    seen = envs.reset(seed=0)[0]["agentview"][0]
    envs.close()
    np.testing.assert_array_equal(seen, images[1])
    assert np.any(seen != images[0])


@pytest.mark.libero_assets
def test_frames_hardly_change() -> None:
    """Levels of 255 between fast and coarse frames of the real meshes, and triangles drawn."""
    model = load_task_model(get_task("goal", 8), assets="libero")
    sim, shared = LiberoSim(model), load_shared(model)
    sim.reset(model.official_layout(0))
    sim.prepare_render()
    preload(shared, coarse=True)
    assert "coarse_mesh_chunks" in shared.derived
    pair = PainterPair(shared, 128, coarse=True)
    for name in CAMERAS:
        fast, coarse = pair.draw(sim.data, fixed_camera(sim._model, name))
        assert 0.05 < np.abs(fast.astype(int) - coarse).mean() < 3.0
        assert pair.triangles_drawn() < 0.75 * pair.triangles_drawn(of=0)
    pair.close()
