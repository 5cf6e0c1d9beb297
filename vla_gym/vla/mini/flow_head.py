"""The flow head of the embedded VLA: from noise to a chunk of actions in a few steps."""

from __future__ import annotations

import math

import torch
from torch import nn

from vla_gym.vla.base import ACTION_SIZE
from vla_gym.vla.blocks import Block


class FlowHead(nn.Module):
    """Velocity of a chunk on the straight path from noise to action (Lipman et al. 2023).

    On ``x_t = (1 - t) noise + t action`` it is trained to the expected ``action - noise``. The
    chunk's rows are added to the states of the action queries, and a small transformer lets them
    see each other.
    """

    def __init__(self, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.action_in = nn.Linear(ACTION_SIZE, width)
        self.time_mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, ACTION_SIZE)

    def forward(
        self, hidden: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """Return velocities (B, C, 7) float32.

        Args:
            hidden: (B, C, width) states of the action queries.
            noisy: (B, C, 7) standardised actions on their way.
            time: (B,) in [0, 1): 0 is noise, 1 the action.
        """
        # Frequencies from half a turn to 64 turns over the path.
        turns = torch.logspace(-1, 6, hidden.shape[-1] // 2, base=2.0, device=time.device)
        angles = 2.0 * math.pi * time[:, None] * turns
        embedded = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = hidden + self.action_in(noisy) + embedded[:, None]
        for block in self.blocks:
            x = block(x)
        velocity: torch.Tensor = self.out(self.norm(x))
        return velocity.float()
