"""OpenVLA-OFT's continuous action head and its projector of proprioception."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

#: Numbers of an action.
ACTION_SIZE = 7
#: Numbers of LIBERO's proprioception.
PROPRIO_SIZE = 8


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn(x)


class _ResidualMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(ACTION_SIZE * width)
        self.fc1 = nn.Linear(ACTION_SIZE * width, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, ACTION_SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1ActionHead(nn.Module):
    """Regresses one action from the states of its seven tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = _ResidualMLP(width)

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
