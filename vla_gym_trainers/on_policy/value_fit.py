"""Passes of the value head alone, over what it saw while the last rollouts were played."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor, nn

from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.formulas import value_loss
from vla_gym_trainers.on_policy.minibatches import split

STEPS = 16  # gradient steps of a pass

#: Inputs (n, H) of the value head and returns (n,) of a rollout's chunks, on the CPU. One rollout
#: has few episodes, and all chunks of an episode share its outcome: a head that is fitted to it
#: alone learns the episodes by heart. The returns are those of the policies of then.
Played = deque[tuple[Tensor, Tensor]]


def fit_values(
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    played: Played,
    *,
    epochs: int,
    max_grad_norm: float,
    group: ProcessGroup,
    rng: np.random.Generator,
) -> float:
    """Fit the value head to the returns; it costs next to nothing beside a pass of the VLA.

    A pass is ``STEPS`` gradient steps, and each sees a part of every rollout. What else the
    optimiser holds stays as it is. All processes have as many rollouts and the same state of rng.

    Returns:
        Mean of half the squared error in the last pass, over all processes. Steps whose gradient is
        not finite are left out.
    """
    parameters = list(head.parameters())
    total = count = 0.0
    for _ in range(epochs):
        total = count = 0.0
        # Rollout by rollout, so that several processes draw what one with all their chunks does.
        drawn = [split(len(returns), STEPS, group, rng) for _, returns in played]
        for rows in zip(*drawn, strict=True):
            pairs = zip(played, map(torch.from_numpy, rows), strict=True)
            chosen = [(inputs[i], returns[i]) for (inputs, returns), i in pairs]
            inputs, targets = (
                torch.cat(x).to(parameters[0].device) for x in zip(*chosen, strict=True)
            )
            n = float(group.sum([float(len(targets))]))
            if n == 0.0:  # in all processes
                continue
            loss = value_loss(head(inputs), targets, targets, n, clip=None)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            group.sum_gradients(parameters)
            norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            if not torch.isfinite(norm):  # in all processes: one bad number must not spoil the head
                continue
            optimizer.step()
            total, count = total + float(loss.detach()) * n, count + n
    return float(group.sum([total])) / max(count, 1.0)
