"""Layers that several backends and the RL token have."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vla_gym.errors import ConfigError
from vla_gym.vla.preprocess import IMAGE_SIZE


def check_heads(width: int, num_heads: int) -> None:
    """Raise ConfigError unless attention heads can share a width."""
    if width % num_heads:
        raise ConfigError(f"Expected width divisible by num_heads, got {width} and {num_heads}.")


class Block(nn.Module):
    """Pre-norm transformer block of plain Linear layers (so that peft can adapt each of them)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        check_heads(width, num_heads)
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        last: int | None = None,
    ) -> torch.Tensor:
        """Apply the block.

        Args:
            x: (B, N, width).
            mask: (B, 1, 1, N) bool, True where a key may be attended; None for everywhere.
            causal: Token i sees tokens 0..i only; excludes ``mask`` and ``last``.
            last: Return the last so many tokens only, which attend to all N; the others' outputs
                are not computed.

        Returns:
            (B, N or ``last``, width).
        """
        y = self.norm1(x)
        if last is not None:
            x = x[:, -last:]
        q, k, v = (
            proj(rows).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj, rows in (
                (self.q_proj, y[:, -x.shape[1] :]),
                (self.k_proj, y),
                (self.v_proj, y),
            )
        )
        # Written out: for ~30 tokens on a CPU, torch's fused attention is slower, above all in
        # its backward pass (a training step 167 -> 133 ms).
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if causal:
            count = x.shape[1]
            mask = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            # Not -inf: a sentence without words, masked altogether, must not become NaN.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        y = scores.softmax(dim=-1).to(v.dtype) @ v
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class CameraStem(nn.Module):
    """Four stride-2 convolutions (64 -> 4 pixels), flattened and projected to K tokens.

    Flattening keeps absolute position, which a few pooled tokens would lose.
    """

    def __init__(self, width: int, num_tokens: int, stem_channels: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        channels = (3, 16, 48, 64, stem_channels)
        layers: list[nn.Module] = []
        for i, (inner, outer) in enumerate(zip(channels, channels[1:], strict=False)):
            kernel = 5 if i == 0 else 3
            layers += [nn.Conv2d(inner, outer, kernel, 2, kernel // 2)]
            layers += [nn.GroupNorm(8, outer), nn.GELU()]
        self.convs = nn.Sequential(*layers)
        side = IMAGE_SIZE // 16
        self.proj = nn.Linear(stem_channels * side * side, num_tokens * width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, 3, 64, 64) to tokens (B, K, width)."""
        tokens = self.proj(self.convs(images).flatten(1))
        return tokens.unflatten(1, (self.num_tokens, -1))


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    """OpenVLA-OFT's action head, (..., inputs) to (..., outputs); named as in the checkpoints."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(inputs), nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(2))
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        result: torch.Tensor = self.fc2(self.layer_norm2(x))
        return result
