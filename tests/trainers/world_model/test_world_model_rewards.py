"""Reward terms against torch.distributions and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model.losses import next_token_loss
from vla_gym_trainers.world_model.rewards import (
    TERMS,
    cells,
    check_weights,
    memory_divergence,
    prediction_error,
    uncertainty,
)


@pytest.fixture
def logits() -> torch.Tensor:
    return 3.0 * torch.randn(5, 4, 7, generator=torch.Generator().manual_seed(0))


def test_uncertainty_is_the_mean_entropy_in_units_of_its_largest(logits):
    expected = Categorical(logits=logits).entropy().mean(1) / math.log(7)
    torch.testing.assert_close(uncertainty(logits), expected)
    assert uncertainty(torch.zeros(2, 4, 7)).tolist() == pytest.approx([1.0, 1.0])
    sure = torch.zeros(1, 4, 7)
    sure[..., 3] = 1000.0
    assert uncertainty(sure).tolist() == [0.0]


def test_prediction_error_is_the_mean_cross_entropy_in_the_same_units(logits):
    tokens = torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(1))
    each = -Categorical(logits=logits).log_prob(tokens)
    torch.testing.assert_close(next_token_loss(logits, tokens), each)
    torch.testing.assert_close(prediction_error(logits, tokens), each.mean(1) / math.log(7))
    assert prediction_error(torch.zeros(2, 4, 7), tokens[:2]).tolist() == pytest.approx([1.0, 1.0])


def test_memory_divergence_by_hand():
    before = torch.zeros(2, 4)
    after = torch.tensor([[0.5, -0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]])
    assert memory_divergence(before, after).tolist() == [0.5, 0.0]
    assert memory_divergence(-torch.ones(1, 9), torch.ones(1, 9)).item() == pytest.approx(2.0)


def test_cells_by_hand():
    positions = np.array([[0.0, 0.049, -0.001], [0.051, 0.1, 0.26]])
    assert cells(positions).tolist() == [[0, 0, -1], [1, 2, 5]]


def test_weights_are_of_known_terms():
    assert check_weights({"task": 1, "uncertainty": 0.5}) == {"task": 1.0, "uncertainty": 0.5}
    with pytest.raises(ConfigError, match=rf"{', '.join(TERMS)}, got 'novelty'"):
        check_weights({"task": 1.0, "novelty": 1.0})
    with pytest.raises(ConfigError, match="got none"):
        check_weights({})
    for weights in ({"task": math.nan}, {"task": "1"}, {"task": None}):
        with pytest.raises(ConfigError, match="finite"):
            check_weights(weights)
    for names in (["task"], {1: 2.0, "task": 1.0}):
        with pytest.raises(ConfigError, match="by name"):
            check_weights(names)
