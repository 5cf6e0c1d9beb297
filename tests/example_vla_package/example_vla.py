"""A VLA that always does the same: what a backend of one's own must offer.

Its checkpoint is a folder with config.json::

    {"model_type": "constant", "action": [0, 0, 0, 0, 0, 0, -1]}
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from vla_gym.errors import WeightsError
from vla_gym.vla import FrozenVLA, VLAOutput


class ConstantVLA(FrozenVLA):
    """A FrozenVLA (vla_gym/vla/base.py): five attributes and ``infer``."""

    horizon = 4  # C, actions in a chunk
    num_hidden_tokens = 2  # M
    hidden_size = 16  # H
    image_size = 64  # pixels of the renders that infer() gets

    def __init__(self, name: str, action: torch.Tensor) -> None:
        self.name = name
        self.action = action

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,  # noqa: ARG003
        compile: bool = False,  # noqa: ARG003
        scale: float = 1.0,  # options of its own: load("constant:/path", scale=0.5)
    ) -> ConstantVLA:
        """Load a checkpoint; ``load`` calls this."""
        try:
            action = json.loads((folder / "config.json").read_text())["action"]
        except (OSError, ValueError, KeyError) as error:
            raise WeightsError(f"Cannot load the constant VLA {folder}: {error}") from error
        # `infer` returns float32 whatever the weights are in; there is nothing to compile.
        return cls(folder.name, scale * torch.tensor(action, device=device, dtype=torch.float32))

    def infer(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,  # noqa: ARG002
    ) -> VLAOutput:
        """Return hidden states (B, M, H) and chunks (B, C, 7) in the environment's units."""
        batch = len(instructions)
        brightness = torch.from_numpy(images["agentview"].mean(axis=(1, 2, 3))).float()
        hidden = brightness.view(batch, 1, 1).expand(-1, self.num_hidden_tokens, self.hidden_size)
        return VLAOutput(
            hidden.to(self.action.device), self.action.expand(batch, self.horizon, 7).clone()
        )
