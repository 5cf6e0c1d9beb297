"""Statistics of success counts: intervals and paired exact tests."""

from __future__ import annotations

import math
from statistics import NormalDist

from vla_gym.errors import ConfigError


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's score interval, of 95 % confidence, of a success rate.

    With ``p = s / n`` and ``z`` the normal quantile of 0.975, centre and half width are
    ``(p + z^2 / 2n) / (1 + z^2 / n)`` and ``z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)``.

    Both bounds are inside [0, 1]; without trials they are 0 and 1.

    Raises:
        ConfigError: If the counts are out of range.
    """
    if not 0 <= successes <= trials:
        raise ConfigError(f"Expected 0 <= successes <= trials, got {successes} of {trials}.")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    rate = successes / trials
    denominator = 1.0 + z * z / trials
    centre = (rate + z * z / (2.0 * trials)) / denominator
    spread = math.sqrt(rate * (1.0 - rate) / trials + z * z / (4.0 * trials * trials))
    half = z * spread / denominator
    # At 0 or n successes one bound is 0 or 1 exactly; rounding must not move it outside.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def sign_test(wins: int, losses: int) -> float:
    """Return the exact two-sided p-value of a sign test.

    Under the null hypothesis each of the ``wins + losses`` pairs of which only one succeeded is a
    fair coin: ``p = min(1, 2 * P[Binomial(wins + losses, 1/2) <= min(wins, losses)])``. For paired
    success counts this is McNemar's exact test.
    """
    decided = wins + losses
    tail = sum(math.comb(decided, i) for i in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**decided)  # of integers: 2**1024 is no float
