"""Exploration noise: sizes, sharing inside a chunk, levels per episode, seeding."""

from __future__ import annotations

import numpy as np
import pytest

from vla_gym_trainers.td3.exploration import ChunkNoise

SCALE = (1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 1.0)


def test_shared_offset_and_white_part() -> None:
    shared = ChunkNoise(8, white=0.0, chunk=0.1, scale=SCALE, seed=0).sample(np.arange(3))
    assert shared.shape == (3, 8, 7)
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:, :1], shared.shape))
    white = ChunkNoise(8, white=0.1, chunk=0.0, scale=SCALE, seed=0).sample(np.arange(1))
    assert np.ptp(white[0, :, 0]) > 0


def test_sizes() -> None:
    noise = ChunkNoise(4, white=0.03, chunk=0.04, scale=SCALE, seed=0)
    draws = []
    for _ in range(3000):
        draws.append(noise.sample(np.arange(1))[0])
        noise.end_episodes(np.array([0]))
    # var = E[level^2] * (white^2 + chunk^2) * scale^2, E[level^2] = 1/3
    expected = 0.05 / np.sqrt(3) * np.array(SCALE)
    np.testing.assert_allclose(np.std(draws, axis=(0, 1)), expected, rtol=0.1)


def test_correlation_of_successive_offsets():
    """E[v v'] = rho for v, v' of variance 1; the episode's first offset is drawn anew."""
    noise = ChunkNoise(1, white=0.0, chunk=1.0, scale=SCALE, seed=3, correlation=0.8)
    noise.sample(np.arange(1))
    noise._levels[0] = 1.0
    values = np.stack([noise.sample(np.arange(1))[0, 0] / SCALE for _ in range(4000)])
    assert values.std() == pytest.approx(1.0, abs=0.05)
    assert np.mean(values[1:] * values[:-1]) == pytest.approx(0.8, abs=0.05)
    constant = ChunkNoise(1, white=0.0, chunk=1.0, scale=SCALE, seed=4, correlation=1.0)
    first, second = constant.sample(np.arange(2)), constant.sample(np.arange(2))
    np.testing.assert_array_equal(first, second)
    constant.end_episodes(np.array([0]))
    third = constant.sample(np.arange(2))
    assert not np.allclose(third[0] / third[0, 0, 0], first[0] / first[0, 0, 0])
    np.testing.assert_array_equal(third[1], first[1])
