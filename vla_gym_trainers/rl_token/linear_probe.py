"""Linear probes: how much of a quantity can be read off features by a linear map."""

from __future__ import annotations

import numpy as np

from vla_gym.errors import ConfigError

#: Ridge penalties tried, relative to the features' unit variance.
PENALTIES = tuple(10.0 ** np.arange(-6.0, 5.0))
# Share of the training episodes on which the penalty is chosen.
VALIDATION_SHARE = 0.25
# The normal equations have the smaller of rows and columns; beyond this, rows are left out.
MAX_UNKNOWNS = 4096
# Largest number of features values held at once (1 GB of float64).
MAX_VALUES = 2**27


def fit_linear_probe(
    features: np.ndarray, targets: np.ndarray, episodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit ridge regression on standardised features; the penalty is chosen on held-out episodes.

    For every target k the weights w minimise ``mean((x w + b - y_k)^2) + penalty_k |w|^2``; the
    penalty is the one of :data:`PENALTIES` that predicts a quarter of the episodes best after
    fitting on the rest. The final fit is on all of them. Without features the probe predicts the
    mean. Features are (N, F), targets (N, K); ``episodes`` (N,) says which one a row is from, and
    an episode is never divided.

    Returns:
        Weights (F, K) and bias (K,): features (N, F) predict ``features @ weights + bias``; and the
        penalty (K,) chosen for each target.

    Raises:
        ConfigError: If there are fewer than two episodes, or a value is not finite.
    """
    numbers = np.unique(episodes)
    if len(numbers) < 2:
        raise ConfigError(f"A probe needs at least two episodes, got {len(numbers)}.")
    if not (np.isfinite(features).all() and np.isfinite(targets).all()):
        raise ConfigError("Features and targets of a probe must be finite.")
    # Drawn: every fourth would be a task by itself if four tasks took turns.
    share = max(1, round(VALIDATION_SHARE * len(numbers)))
    check = np.isin(episodes, np.random.default_rng(0).permutation(numbers)[:share])
    errors = [
        np.square(features[check] @ weights + bias - targets[check]).mean(axis=0)
        for weights, bias in _path(features[~check], targets[~check])
    ]
    best, path = np.argmin(errors, axis=0), _path(features, targets)
    weights = np.stack([path[i][0][:, k] for k, i in enumerate(best)], axis=1)
    bias = np.array([path[i][1][k] for k, i in enumerate(best)])
    return weights, bias, np.array(PENALTIES)[best]


def _path(features: np.ndarray, targets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return weights and bias of every penalty; one decomposition serves all of them."""
    limit = MAX_VALUES // max(1, features.shape[1])
    if min(features.shape) > MAX_UNKNOWNS:
        limit = min(limit, MAX_UNKNOWNS)
    step = max(1, -(-len(features) // max(limit, 1)))
    x, y = features[::step].astype(np.float64), targets[::step].astype(np.float64)
    mean, std, centre = x.mean(axis=0), x.std(axis=0), y.mean(axis=0)
    # A feature that never changes says nothing; dividing by its rounding error would.
    scale = np.where(std > 1e-6 * (np.abs(mean) + 1e-6), std, np.inf)
    x = (x - mean) / scale
    y = y - centre
    count, width = x.shape
    wide = width > count
    gram = (x @ x.T if wide else x.T @ x) / count
    values, vectors = np.linalg.eigh(gram) if min(gram.shape) else (np.empty(0), gram)
    projected = vectors.T @ (y if wide else x.T @ y) / count
    path = []
    for penalty in PENALTIES:
        shrunk = vectors @ (projected / (np.maximum(values, 0.0) + penalty)[:, None])
        weights = (x.T @ shrunk if wide else shrunk) / scale[:, None]
        path.append((weights, centre - mean @ weights))
    return path
