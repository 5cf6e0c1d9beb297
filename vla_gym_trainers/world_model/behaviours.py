"""How behaviours differ: what a world model makes of their steps, how many states they visit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_gym_trainers.world_model import rewards
from vla_gym_trainers.world_model.data import BEHAVIOURS, Sequences
from vla_gym_trainers.world_model.evaluate import forecasts, memory_states
from vla_gym_trainers.world_model.protocol import WorldModel

#: How far an object must be from where it was to count, in metres.
MOVED = 0.02


def cells_visited(positions: np.ndarray, groups: np.ndarray) -> int:
    """Return how many different cells positions (N, D) are in, in metres; NaN does not count.

    The same cell counts once for each of the groups (N,).
    """
    known = np.isfinite(positions).all(axis=1)
    cells = rewards.cells(positions[known])
    return len(np.unique(np.column_stack([groups[known], cells]), axis=0))


def state_coverage(data: Sequences, rows: np.ndarray) -> dict[str, float]:
    """Return the cells that the chunks of rows (n,) with a next one led to, for each chunk.

    Returns:
        ``coverage``, in [0, 1]: cells of the end effector's positions (the first three numbers of
        proprio), apart by task; ``object_coverage``: cells, apart by task and object, of objects
        that are farther than :data:`MOVED` from where they were in the episode's first row; 0 where
        no suite tells of objects.
    """
    count, reached = max(len(rows), 1), rows + 1
    arm = cells_visited(data.proprio[reached, :3], data.task[reached])
    bounds = data.bounds()
    first = np.repeat(bounds[:, 0], np.diff(bounds)[:, 0])[reached]
    now, objects = data.objects[reached], data.objects.shape[1]
    moved = np.linalg.norm(now - data.objects[first], axis=2) > MOVED  # NaN: False
    which = data.task[reached, None] * objects + np.arange(objects)
    things = cells_visited(now[moved], which[moved])
    return {"coverage": arm / count, "object_coverage": things / count}


@torch.no_grad()
def step_terms(model: WorldModel, data: Sequences, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the reward terms (n,) that a world model would give for rows (n,) with a next one.

    The data has the model's tokens.
    """
    states = memory_states(model, data)
    found: list[dict[str, Tensor]] = []
    for part, logits, following in forecasts(model, data, states, rows):
        found.append(
            {
                rewards.DIVERGENCE: rewards.memory_divergence(states[part], states[part + 1]),
                rewards.UNCERTAINTY: rewards.uncertainty(logits),
                rewards.ERROR: rewards.prediction_error(logits, following),
            }
        )
    return {name: torch.cat([part[name] for part in found]).cpu().numpy() for name in found[0]}


def by_behaviour(
    model: WorldModel, data: Sequences, *, paired: bool = False
) -> dict[str, dict[str, Any]]:
    """Return, by behaviour, the means of :func:`step_terms` and :func:`state_coverage`.

    If ``paired``, of episode number n of every behaviour only as many steps count as the shortest
    of them has: all behaviours have the same starts and the same number of steps then.

    Returns:
        ``steps`` (of the environment), ``memory_divergence``, ``uncertainty``,
        ``prediction_error``, ``coverage`` and ``object_coverage``.
    """
    results, bounds = dict[str, dict[str, Any]](), data.bounds()
    who = data.behaviour[bounds[:, 0]]
    found = [kind for kind in range(len(BEHAVIOURS)) if (who == kind).any()]
    lengths = np.diff(bounds)[:, 0] - 1
    if paired:
        shortest = np.min([lengths[who == kind] for kind in found], axis=0)
        for kind in found:
            lengths[who == kind] = shortest
    for kind in found:
        spans = zip(bounds[who == kind, 0], lengths[who == kind], strict=True)
        rows = np.concatenate([first + np.arange(length) for first, length in spans])
        rows = rows[data.executed[rows] > 0]
        if len(rows):
            terms = {k: float(v.mean()) for k, v in step_terms(model, data, rows).items()}
            results[BEHAVIOURS[kind]] = {"steps": len(rows), **terms, **state_coverage(data, rows)}
    return results
