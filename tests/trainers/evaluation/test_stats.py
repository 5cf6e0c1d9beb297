"""Known answers of intervals and paired tests."""

from __future__ import annotations

import pytest

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.statistics import compare_paired, sign_test, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # p = 0.5, n = 10, z = 1.959964: centre 0.5, half z sqrt(.025 + z^2/400) / (1 + z^2/10)
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),  # upper = z^2 / (n + z^2) = 3.8415 / 13.8415
        (10, 10, 0.7225, 1.0),
        (8, 50, 0.0834, 0.2851),
    ],
)
def test_wilson_known_answers(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=2e-4)


def test_wilson_stays_in_unit_interval_and_shrinks() -> None:
    for trials in (1, 3, 50, 1000):
        for successes in (0, trials // 2, trials):
            low, high = wilson_interval(successes, trials)
            assert 0.0 <= low <= successes / trials <= high <= 1.0
    wide, narrow = wilson_interval(10, 20), wilson_interval(100, 200)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("arguments", [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_wilson_refuses_nonsense(arguments: tuple[int, int, float]) -> None:
    with pytest.raises(ConfigError):
        wilson_interval(*arguments)


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1/2
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),  # 2 * (1 + 6 + 15 + 20) / 64 > 1
    ],
)
def test_sign_test_known_answers(wins: int, losses: int, p_value: float) -> None:
    assert sign_test(wins, losses) == pytest.approx(p_value)


def test_compare_paired_counts_each_kind() -> None:
    policy = [True, True, True, False, False, True]
    baseline = [False, False, True, True, False, False]
    result = compare_paired(policy, baseline)
    assert (result.wins, result.losses, result.both, result.neither) == (3, 1, 1, 1)
    assert result.p_value == pytest.approx(2 * (1 + 4) / 16)


def test_compare_paired_needs_the_same_states() -> None:
    with pytest.raises(ConfigError, match="same states"):
        compare_paired([True], [True, False])
