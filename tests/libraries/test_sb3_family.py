"""Stable-Baselines3, sb3-contrib and sbx: each example trains, and its replay buffer is right."""

import importlib

import numpy as np
import pytest
from episode_clock import FLAT, OPTIONS, check_transitions

pytest.importorskip("stable_baselines3")


def stored(buffer):
    """Return what is in a replay buffer of SB3: observations, next ones, rewards, ends."""
    rows = buffer.pos

    def clock(obs):
        return obs["clock"] if isinstance(obs, dict) else obs

    arrays = clock(buffer.observations), clock(buffer.next_observations), buffer.rewards
    obs, next_obs, rewards, dones, timeouts = (
        array[:rows].reshape(rows * buffer.n_envs, -1)
        for array in (*arrays, buffer.dones, buffer.timeouts)
    )
    return obs, next_obs, rewards, (dones > 0) & ~(timeouts > 0), timeouts


@pytest.mark.parametrize(
    ("library", "example", "options"),
    [
        ("stable_baselines3", "sb3_sac", OPTIONS),
        ("sb3_contrib", "sb3_contrib_tqc", OPTIONS),
        ("sbx", "sbx_sac", FLAT),
    ],
)
def test_replay(library, example, options):
    pytest.importorskip(library, reason=f"{library} is not installed")
    model = importlib.import_module(f"examples.{example}").train(60, **options)
    obs, next_obs, rewards, terminated, truncated = stored(model.replay_buffer)
    assert len(obs) == 60
    check_transitions(obs, next_obs, rewards, terminated, truncated)
    assert model.gamma == pytest.approx(0.99**8)
    assert model._n_updates > 0
    # What it learns from: no bootstrap at a success alone.
    sampled = model.replay_buffer.sample(200)
    ends = np.asarray(
        sampled.next_observations["clock"] if options is OPTIONS else sampled.next_observations
    )[:, 2]
    np.testing.assert_array_equal(np.asarray(sampled.dones).reshape(-1) == 1, ends == 1)
