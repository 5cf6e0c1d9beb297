"""OpenVLA-OFT's continuous action head and its projector of proprioception."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vla_gym.vla.base import ACTION_SIZE
from vla_gym.vla.blocks import ResidualMLP


class L1ActionHead(nn.Module):
    """Regresses one action from the states of its seven tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = ResidualMLP(ACTION_SIZE * width, width, ACTION_SIZE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map states (B, C * 7, H) to normalised actions (B, C, 7)."""
        actions: torch.Tensor = self.model(hidden.unflatten(1, (-1, ACTION_SIZE)).flatten(2))
        return actions


class ProprioProjector(nn.Module):
    """From normalised proprioception to one more token."""

    def __init__(self, proprio_size: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_size, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: torch.Tensor) -> torch.Tensor:
        """Map (B, size) to (B, width)."""
        projected: torch.Tensor = self.fc2(F.gelu(self.fc1(proprio)))
        return projected
