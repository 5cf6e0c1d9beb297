"""Exploration noise: sizes, sharing inside a chunk, levels per episode, seeding."""

from __future__ import annotations

import numpy as np
import pytest

from vla_gym.errors import ConfigError
from vla_gym_trainers.exploration import ChunkNoise

SCALE = (1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 1.0)


def test_shared_offset_and_white_part() -> None:
    shared = ChunkNoise(8, white=0.0, chunk=0.1, scale=SCALE, seed=0).sample(3)
    assert shared.shape == (3, 8, 7)
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:, :1], shared.shape))
    white = ChunkNoise(8, white=0.1, chunk=0.0, scale=SCALE, seed=0).sample(1)
    assert np.ptp(white[0, :, 0]) > 0


def test_sizes() -> None:
    noise = ChunkNoise(4, white=0.03, chunk=0.04, scale=SCALE, seed=0)
    draws = []
    for _ in range(3000):
        draws.append(noise.sample(1)[0])
        noise.end_episode(0)
    # var = E[level^2] * (white^2 + chunk^2) * scale^2, E[level^2] = 1/3
    expected = 0.05 / np.sqrt(3) * np.array(SCALE)
    np.testing.assert_allclose(np.std(draws, axis=(0, 1)), expected, rtol=0.1)


def test_level_lasts_one_episode() -> None:
    noise = ChunkNoise(2, white=0.0, chunk=1.0, scale=SCALE, seed=1)
    noise.sample(2)
    before = list(noise._levels)
    noise.sample(2)
    assert noise._levels == before
    noise.end_episode(1)
    assert noise._levels[0] == before[0]
    assert noise._levels[1] != before[1]


def test_seeded_and_checked() -> None:
    first, second = (ChunkNoise(2, 0.1, 0.1, SCALE, seed=5).sample(2) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    with pytest.raises(ConfigError, match="negative"):
        ChunkNoise(2, -0.1, 0.1, SCALE, seed=0)
