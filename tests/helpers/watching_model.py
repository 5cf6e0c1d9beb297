"""A tiny world model that fits the toy environment of tokens and the tiny VLA."""

from __future__ import annotations

from typing import Any

import torch

from vla_gym_trainers.world_model.model import GRUWorldModel, WorldModelSizes
from vla_gym_trainers.world_model.tokenizer import TokenizerConfig

TOKENIZER = TokenizerConfig(frame_size=4, grid_size=2, codebook_size=6, code_size=3, width=4)


def watching_model(seed: int = 0, **sizes: Any) -> GRUWorldModel:
    """A model with random weights and a memory of 8 numbers; give it a VLA."""
    torch.manual_seed(seed)
    known: dict[str, Any] = {
        "vla": "mini",
        "feature_size": 32,
        "chunk_len": 4,
        "image_size": 64,
        "memory_hidden": 8,
        "width": 8,
        "num_blocks": 1,
        "num_heads": 2,
        "tokenizer": TOKENIZER,
    }
    model = GRUWorldModel(WorldModelSizes(**{**known, **sizes}))
    model.tokenizer.codebook.normal_(std=0.3)
    return model.eval().requires_grad_(False)
