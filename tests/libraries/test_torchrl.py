"""TorchRL: its example trains, and its replay buffer is right."""

from __future__ import annotations

import numpy as np
import pytest
from episode_clock import FLAT, check_transitions

pytest.importorskip("torchrl", reason="torchrl is not installed")


def test_replay():
    from examples.torchrl_sac import train

    buffer, loss = train(60, **FLAT)
    data = buffer[:]
    assert len(data) == 60 and np.isfinite(loss)
    after = data["next"]
    check_transitions(
        data["observation"],
        after["observation"],
        after["reward"],
        after["terminated"],
        after["truncated"],
    )
    # The infos of the step, not of the reset that may follow it.
    np.testing.assert_allclose(after["discount"].flatten(), 0.99**8)
    np.testing.assert_array_equal(after["success"].flatten(), after["terminated"].flatten())
