"""What only a memory can know: what the wrist camera saw before."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_gym_trainers.rl_token.linear_probe import fit_linear_probe
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.evaluate import bootstrap, memory_states
from vla_gym_trainers.world_model.protocol import WorldModel

#: Steps that lie between a frame and the state that is asked for it.
LAGS = (1, 4, 8, 16)
#: Side of the coarse pictures that are read off the states.
COARSE = 4


def recall(model: WorldModel, train: Sequences, test: Sequences) -> dict[str, Any]:
    """Read what the wrist camera saw some steps ago off the model's states, by linear probes.

    A ridge regression (:func:`.linear_probe.fit_linear_probe`) maps the state at step t to the mean
    colours of the ``COARSE x COARSE`` tiles of the wrist frame at step t - lag. It is fitted on
    training sequences and tested on others. ``memory``: the state; ``no_memory``: the state that
    the model has when it is reset at every step: it knows the present observation and the last
    action.

    Args:
        model: The model.
        train: Sequences that probes are fitted on.
        test: Sequences on other layouts.

    Returns:
        By lag: ``n_steps``, ``n_episodes``; share of the variance that is explained, ``memory`` and
        ``no_memory`` (1: all; 0: as the mean picture does); ``memory_gain``: their difference, with
        bounds over episodes. Lags that no episode is long enough for are left out.
    """
    states, sets = _states(model, train, test), (train, test)
    pictures, ages = [_coarse(d.frames) for d in sets], [_ages(d) for d in sets]
    results: dict[str, Any] = {}
    for lag in LAGS:
        fit, check = (np.flatnonzero(age >= lag) for age in ages)
        if len(np.unique(train.episode[fit])) < 2 or not len(check):
            continue
        truth, wanted = pictures[0][fit - lag], pictures[1][check - lag]
        spread = np.square(wanted - truth.mean(axis=0)).sum(axis=1)
        explained: dict[str, np.ndarray] = {}
        for name, (one, other) in states.items():
            probe = fit_linear_probe(one[fit], truth, train.episode[fit])
            error = np.square(probe(other[check]) - wanted).sum(axis=1)
            explained[name] = 1.0 - error / spread.mean()
        episode = test.episode[check]
        results[str(lag)] = {
            "n_steps": len(check),
            "n_episodes": len(np.unique(episode)),
            **{name: float(values.mean()) for name, values in explained.items()},
            "memory_gain": bootstrap(explained["memory"] - explained["no_memory"], episode),
        }
    return results


def _coarse(frames: np.ndarray) -> np.ndarray:
    """Return the mean colours of the tiles, (N, COARSE * COARSE * 3) float32 in [0, 1]."""
    tile = frames.shape[1] // COARSE
    tiles = frames.reshape(len(frames), COARSE, tile, COARSE, tile, 3).astype(np.float32)
    means: np.ndarray = tiles.mean(axis=(2, 4)).reshape(len(frames), -1) / 255.0
    return means


def _ages(data: Sequences) -> np.ndarray:
    """Return how many rows (N,) of its episode come before each row."""
    first = data.bounds()[:, 0]
    rows = np.arange(len(data))
    return rows - first[np.searchsorted(first, rows, side="right") - 1]


def _states(
    model: WorldModel, train: Sequences, test: Sequences
) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the states after every row of both sets, with memory and without."""
    return {
        name: tuple(
            memory_states(model, data, reset=name == "no_memory").cpu().numpy()
            for data in (train, test)
        )
        for name in ("memory", "no_memory")
    }
