"""Passes of the value head alone, over what it saw while the last rollouts were played."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy import losses
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.objective import split
from vla_gym_trainers.on_policy.rollout import Rollout

STEPS = 16  # gradient steps of a pass


class ValueMemory:
    """Inputs of the value head and returns of the last rollouts.

    One rollout has few episodes, and all chunks of an episode share its outcome: a head that is
    fitted to it alone learns the episodes by heart. Over several rollouts it finds what they have
    in common. The returns are those of the policies of then.
    """

    def __init__(self, rollouts: int) -> None:
        """Keep at most so many rollouts."""
        self.parts: deque[tuple[Tensor, Tensor]] = deque(maxlen=rollouts)

    def add(self, rollout: Rollout, returns: Tensor) -> None:
        """Keep the inputs (n, H) and returns (n,) of a rollout's chunks, on the CPU.

        Args:
            rollout: Of a policy with a value head.
            returns: [rows, chunks].

        Raises:
            ConfigError: If there was no value head.
        """
        data = rollout.data
        if "value_input" not in rollout.shape.act:
            raise ConfigError("Fitting values needs rollouts of a policy with a value head.")
        valid = data["valid"]
        self.parts.append((data["value_input"][valid], returns[valid].cpu()))

    def state_dict(self) -> list[dict[str, Tensor]]:
        """Return what is kept."""
        return [{"inputs": inputs, "returns": returns} for inputs, returns in self.parts]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.parts.clear()
        self.parts.extend((part["inputs"], part["returns"]) for part in state)


def fit_values(
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    memory: ValueMemory,
    *,
    epochs: int,
    max_grad_norm: float,
    group: ProcessGroup,
    rng: np.random.Generator,
) -> float:
    """Fit the value head to the returns; it costs next to nothing beside a pass of the VLA.

    Args:
        head: Changed in place.
        optimizer: Holds its parameters; what else it holds stays as it is.
        memory: As many rollouts in all processes.
        epochs: Passes, of ``STEPS`` gradient steps each; a step sees a part of every rollout.
        max_grad_norm: Gradients are scaled down to this norm.
        group: The processes.
        rng: In the same state in all of them.

    Returns:
        Mean of half the squared error in the last pass, over all processes. Steps whose gradient is
        not finite are left out.
    """
    parameters = list(head.parameters())
    device = parameters[0].device
    total = count = 0.0
    for _ in range(epochs):
        total = count = 0.0
        # Rollout by rollout, so that several processes draw what one with all their chunks does.
        drawn = [split(len(returns), STEPS, group, rng) for _, returns in memory.parts]
        for rows in zip(*drawn, strict=True):
            chosen = [torch.from_numpy(part) for part in rows]
            pairs = list(zip(memory.parts, chosen, strict=True))
            inputs = torch.cat([inputs[i] for (inputs, _), i in pairs]).to(device)
            targets = torch.cat([returns[i] for (_, returns), i in pairs]).to(device)
            n = float(group.sum([float(len(targets))]))
            if n == 0.0:  # in all processes
                continue
            loss = losses.value_loss(head(inputs), targets, targets, n, clip=None)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            group.sum_gradients(parameters)
            norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            if not torch.isfinite(norm):  # in all processes: one bad number must not spoil the head
                continue
            optimizer.step()
            total, count = total + float(loss.detach()) * n, count + n
    return float(group.sum([total])) / max(count, 1.0)
