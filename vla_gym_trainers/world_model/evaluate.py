"""What a world model predicts and remembers on sequences that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_gym_trainers.rl_token.linear_probe import fit_linear_probe
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.losses import next_token_loss
from vla_gym_trainers.world_model.protocol import WorldModel

#: Steps that are predicted in one forward pass.
BATCH = 128
#: Resamples of a bootstrap.
RESAMPLES = 2000
#: Steps that lie between a frame and the state that :func:`recall` asks for it.
LAGS = (1, 4, 8, 16)
#: Side of the coarse pictures that it reads off the states.
COARSE = 4


class Predictions(NamedTuple):
    """What was predicted at n steps.

    Attributes:
        cross_entropy: (n,) nats, mean over the next frame's tokens.
        accuracy: (n,) share of tokens whose likeliest value is right.
        frames: (n, S, S, 3) uint8, the expected frames.
    """

    cross_entropy: np.ndarray
    accuracy: np.ndarray
    frames: np.ndarray


@torch.no_grad()
def memory_states(model: WorldModel, data: Sequences, *, reset: bool = False) -> Tensor:
    """Return the states (N, S) after every row.

    With ``reset`` every step starts from the initial state, as if it were an episode's first: what
    the model knows without memory.
    """
    bounds, last = data.bounds(), data.last_actions()
    arrays = (data.features, data.proprio, last)
    states = model.initial_state(len(data)).clone()
    device = states.device
    # Step t of all episodes at once: these are the rows that have one.
    for t in range(int(np.diff(bounds).max())):
        rows = bounds[bounds[:, 0] + t < bounds[:, 1], 0] + t
        before = model.initial_state(len(rows)) if reset or t == 0 else states[rows - 1]
        inputs = (torch.from_numpy(array[rows]).to(device) for array in arrays)
        states[rows] = model.update(before, *inputs)
    return states


def forecasts(
    model: WorldModel, data: Sequences, states: Tensor, rows: np.ndarray
) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Yield, batch by batch, rows, the logits (b, P, K) of what follows, and the tokens that did.

    From the states (N, S) after every row, at rows (n,) with a next one.
    """
    for part in np.array_split(rows, max(1, math.ceil(len(rows) / BATCH))):
        tokens, after, action = (
            torch.from_numpy(array).to(states.device)
            for array in (data.tokens[part], data.tokens[part + 1], data.actions[part])
        )
        yield part, model.logits(states[part], tokens, action), after


@torch.no_grad()
def predict(model: WorldModel, data: Sequences, states: Tensor, rows: np.ndarray) -> Predictions:
    """Predict what follows some rows (n,), from the states (N, S) after every row."""
    found: list[Predictions] = []
    for _, logits, after in forecasts(model, data, states, rows):
        right = (logits.argmax(-1) == after).float().mean(1)
        loss = next_token_loss(logits, after).mean(1)
        frames = model.decode(logits.softmax(-1))
        found.append(Predictions(loss.cpu().numpy(), right.cpu().numpy(), frames))
    return Predictions(*(np.concatenate(column) for column in zip(*found, strict=True)))


def copy_cross_entropy(stay: float, codebook_size: int, same: np.ndarray) -> np.ndarray:
    """Return the cross-entropy (n,) of the guess that a token stays, in nats.

    ``p(token stays) = q``, in (0, 1), and ``(1 - q) / (K - 1)`` for each of the others; ``same``
    (n, P) says which did stay.
    """
    flips = -math.log((1.0 - stay) / (codebook_size - 1))
    return np.where(same, -math.log(stay), flips).mean(axis=1)


def stay_rate(data: Sequences) -> float:
    """Return the share of tokens that stay from a row to the next one: the fitted q of copying.

    With one token more of each kind, so that it is neither 0 nor 1.
    """
    rows = data.transitions()
    same = data.tokens[rows] == data.tokens[rows + 1]
    return float((same.sum() + 1) / (same.size + 2))


def psnr(frames: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the peak signal-to-noise ratios (n,) in dB of frames (n, S, S, 3) uint8.

    ``10 log10(255^2 / mean squared error)`` of each frame; at most that of one grey level's error
    in one number.
    """
    difference = frames.astype(np.float32) - truth.astype(np.float32)
    error = np.square(difference).reshape(len(frames), -1).mean(axis=1)
    return 10.0 * np.log10(255.0**2 / np.maximum(error, 1.0 / difference[0].size))


def tokenizer_psnr(model: WorldModel, data: Sequences) -> float:
    """Return the mean :func:`psnr` of all frames as their tokens show them."""
    parts = range(0, len(data), BATCH)
    shown = [model.decode(torch.from_numpy(data.tokens[i : i + BATCH])) for i in parts]
    return float(psnr(np.concatenate(shown), data.frames).mean())


def evaluate(model: WorldModel, data: Sequences, stay: float) -> dict[str, Any]:
    """Return the figures of a result card: prediction with and without memory, and copying.

    The sequences, with the model's tokens, are on layouts that it was not trained on; ``stay`` is
    the :func:`stay_rate` of the training data.

    Returns:
        ``n_frames`` and ``n_episodes`` predicted; ``tokenizer_psnr``; for each of ``memory``,
        ``no_memory`` (reset at every step) and ``copy`` (the last frame): ``cross_entropy`` (nats a
        token), ``accuracy`` and ``psnr`` (dB, of the expected frame; ``copy``: of the last frame
        itself); ``memory_gain`` and ``copy_gain``: cross-entropy less with memory, with the bounds
        of :func:`bootstrap`.
    """
    rows = data.transitions()
    truth, episode = data.frames[rows + 1], data.episode[rows]
    results: dict[str, Any] = {"n_frames": len(rows), "n_episodes": len(np.unique(episode))}
    results["tokenizer_psnr"] = tokenizer_psnr(model, data)
    losses: dict[str, np.ndarray] = {}
    for name in ("memory", "no_memory"):
        states = memory_states(model, data, reset=name == "no_memory")
        found = predict(model, data, states, rows)
        losses[name] = found.cross_entropy
        results[name] = {
            "cross_entropy": float(found.cross_entropy.mean()),
            "accuracy": float(found.accuracy.mean()),
            "psnr": float(psnr(found.frames, truth).mean()),
        }
    same = data.tokens[rows] == data.tokens[rows + 1]
    losses["copy"] = copy_cross_entropy(stay, model.codebook_size, same)
    results["copy"] = {
        "cross_entropy": float(losses["copy"].mean()),
        "accuracy": float(same.mean()),
        "psnr": float(psnr(data.frames[rows], truth).mean()),
    }
    for name, other in (("memory_gain", "no_memory"), ("copy_gain", "copy")):
        results[name] = bootstrap(losses[other] - losses["memory"], episode)
    return results


def bootstrap(values: np.ndarray, episode: np.ndarray) -> dict[str, Any]:
    """Return the mean of values (n,) with a 95 % interval over the episodes (n,) they are from.

    Whole episodes are drawn with replacement (their steps are alike), and the mean is taken over
    the steps of those drawn.
    """
    numbers = np.unique(episode, return_inverse=True)[1]
    sums, counts = np.bincount(numbers, values), np.bincount(numbers)
    picks = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def recall(model: WorldModel, train: Sequences, test: Sequences) -> dict[str, Any]:
    """Read what the wrist camera saw some steps ago off the model's states, by linear probes.

    A ridge regression (:func:`.linear_probe.fit_linear_probe`) maps the state at step t to the mean
    colours of the ``COARSE x COARSE`` tiles of the wrist frame at step t - lag. It is fitted on
    training sequences and tested on others. ``memory``: the state; ``no_memory``: the state that
    the model has when it is reset at every step: it knows the present observation and the last
    action.

    Returns:
        By lag: ``n_steps``, ``n_episodes``; share of the variance that is explained, ``memory`` and
        ``no_memory`` (1: all; 0: as the mean picture does); ``memory_gain``: their difference, with
        bounds over episodes. Lags that no episode is long enough for are left out.
    """
    sets = (train, test)
    states = {
        name: [memory_states(model, d, reset=name == "no_memory").cpu().numpy() for d in sets]
        for name in ("memory", "no_memory")
    }
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
            weights, bias, _ = fit_linear_probe(one[fit], truth, train.episode[fit])
            error = np.square(other[check] @ weights + bias - wanted).sum(axis=1)
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
    return tiles.mean(axis=(2, 4)).reshape(len(frames), -1) / 255.0


def _ages(data: Sequences) -> np.ndarray:
    """Return how many rows (N,) of its episode come before each row."""
    return np.concatenate([np.arange(end - first) for first, end in data.bounds()])
