"""The transformer block of the embedded VLA and of the RL token."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm transformer block of plain Linear layers (so that peft can adapt each of them)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        """Apply the block.

        Args:
            x: (B, N, width).
            mask: (B, 1, 1 or N, N) bool, True where a key may be attended; None for everywhere.
            causal: Token i sees tokens 0..i only; excludes ``mask``.
        """
        y = self.norm1(x)
        q, k, v = (
            proj(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Written out: for ~30 tokens on a CPU, torch's fused attention is slower, above all in
        # its backward pass (a training step 167 -> 133 ms).
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if causal:
            count = x.shape[1]
            mask = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        y = scores.softmax(dim=-1).to(v.dtype) @ v
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
