"""Comparison of samples that should come from one distribution."""

from __future__ import annotations

import numpy as np


def same_distribution(
    ours: np.ndarray, theirs: np.ndarray, what: str, thin_ends: bool = False
) -> None:
    """Compare ranges, means and shapes of (N, D) samples, column by column.

    Args:
        ours: (N, D).
        theirs: (M, D).
        what: Named in a failure; ``"arm"``: normal distributions, which have no ends.
        thin_ends: The values are sums of several uniform draws, whose ends are met less often.
    """
    from scipy import stats

    for column in range(ours.shape[1]):
        a, b = ours[:, column], theirs[:, column]
        if np.ptp(b) < 1e-9:
            assert np.allclose(a, b[0], atol=1e-9), (what, column)
            continue
        width, error = np.ptp(b), np.sqrt(a.var() / len(a) + b.var() / len(b))
        assert abs(a.mean() - b.mean()) < 4.5 * error, (what, column)
        if what != "arm":
            count = min(len(a), len(b))
            # The largest of n draws lies about 1/n of the width from the end of a uniform
            # distribution, 1/sqrt(n) from that of a triangular one.
            tolerance = width * (3 / np.sqrt(count) if thin_ends else 12 / count)
            assert abs(a.min() - b.min()) < tolerance, (what, column)
            assert abs(a.max() - b.max()) < tolerance, (what, column)
        assert stats.ks_2samp(a, b).pvalue > 1e-4, (what, column)
