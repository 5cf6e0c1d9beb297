"""Tiny world models, a VLA that tells what it saw, and sequences whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vla_gym.vla import FrozenVLA, VLAOutput
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.model import GRUWorldModel, WorldModelSizes
from vla_gym_trainers.world_model.tokenizer import TokenizerConfig

FEATURES, CHUNK_LEN, ACTION, SIDE = 3, 2, 7, 4
TOKENIZER = TokenizerConfig(frame_size=SIDE, grid_size=2, codebook_size=6, code_size=3, width=4)


class TellingVLA(FrozenVLA):
    """Its output tells both pictures' mean, the instruction's length and proprio; counts rows."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "telling", 8, 2, FEATURES, SIDE

    def __init__(self) -> None:
        self.batches: list[int] = []

    def infer(self, images: dict[str, np.ndarray], instructions: list[str], proprio: Any) -> Any:
        assert all(type(text) is str for text in instructions) and len(proprio) == len(instructions)
        assert set(images) == set(self.cameras)
        self.batches.append(len(instructions))
        rows = zip(images["agentview"], images["wrist"], instructions, proprio, strict=True)
        told = [(a.mean() / 255.0, w.mean() / 255.0, len(t) / 20.0 + p[0]) for a, w, t, p in rows]
        hidden = torch.tensor(told, dtype=torch.float32)[:, None].repeat(1, 2, 1)
        return VLAOutput(hidden, torch.sin(hidden[:, :1, :1]).repeat(1, 8, ACTION))


class OneView(FrozenVLA):
    """Does not look at the wrist camera, which a world model does."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "one", 8, 1, 32, 64
    cameras = ("agentview",)

    def infer(self, images: dict[str, np.ndarray], instructions: list[str], proprio: Any) -> Any:
        assert set(images) == {"agentview"} and len(instructions) == len(proprio)
        return VLAOutput(torch.zeros(len(proprio), 1, 32), torch.zeros(len(proprio), 8, 7))


def random_model(seed: int, **sizes: Any) -> GRUWorldModel:
    """A model with random weights and a memory of 8 numbers; ``sizes``: of WorldModelSizes."""
    torch.manual_seed(seed)
    known: dict[str, Any] = {
        "vla": "mini",
        "memory_hidden": 8,
        "width": 8,
        "num_blocks": 1,
        "num_heads": 2,
        "tokenizer": TOKENIZER,
    }
    return GRUWorldModel(WorldModelSizes(**{**known, **sizes}))


def watching_model(seed: int = 0, **sizes: Any) -> GRUWorldModel:
    """A model that fits the toy environment of tokens and the tiny VLA; give it that VLA."""
    model = random_model(seed, **{"feature_size": 32, "chunk_len": 4, "image_size": 64, **sizes})
    model.tokenizer.codebook.normal_(std=0.3)
    return model.eval().requires_grad_(False)


def toy_model(seed: int = 0, **sizes: Any) -> GRUWorldModel:
    """A model that sees 4 x 4 pictures; its VLA is a TellingVLA."""
    known = {"feature_size": FEATURES, "chunk_len": CHUNK_LEN, "image_size": SIDE}
    model = random_model(seed, **{**known, **sizes})
    model.use_vla(TellingVLA())
    model.eval().requires_grad_(False)
    # The codebook begins with what the encoder makes of some pictures.
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randint(256, (64, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)
    model.tokenizer.loss(pictures, generator, 0.0)
    return model


def toy_sequences(lengths: tuple[int, ...] = (10, 7, 12), seed: int = 0) -> Sequences:
    """Sequences in which row i tells its number: features (i, ...), tokens i, i + 1, ... mod 6."""
    rng, count = np.random.default_rng(seed), sum(lengths)
    rows = np.arange(count)
    executed = np.full(count, CHUNK_LEN)
    executed[np.cumsum(lengths) - 1] = 0
    actions = np.repeat(rows[:, None] + 1.0, CHUNK_LEN * ACTION, axis=1).astype(np.float32)
    actions[executed == 0] = 0.0
    return Sequences(
        frames=rng.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8),
        agentview=rng.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8),
        features=np.repeat(rows[:, None], FEATURES, axis=1).astype(np.float32),
        proprio=rng.normal(size=(count, 8)).astype(np.float32),
        actions=actions,
        executed=executed,
        episode=np.repeat(np.arange(len(lengths)), lengths),
        behaviour=np.zeros(count, np.int64),
        task=np.zeros(count, np.int64),
        objects=np.full((count, 2, 3), np.nan, np.float32),
        tokens=(rows[:, None] + np.arange(TOKENIZER.num_tokens)) % TOKENIZER.codebook_size,
        tasks=["goal_8"],
    )


def cue_sequences(episodes: int = 40, length: int = 9, seed: int = 0) -> Sequences:
    """Sequences that need memory: an episode's first features tell a bit, later tokens are it.

    Tokens of odd rows are 1 + bit, those of even rows are 0, as are all other features. So what
    follows an even row from the third on is known to who remembers alone.
    """
    data = toy_sequences((length,) * episodes)
    bits = np.random.default_rng(seed).integers(2, size=episodes)
    data.features[:], data.proprio[:], data.actions[:] = 0.0, 0.0, 0.0
    data.proprio[:, 3] = np.pi  # a hand that points down
    for bit, (first, end) in zip(bits, data.bounds(), strict=True):
        data.features[first] = 2.0 * bit - 1.0
        data.tokens[first:end] = 0
        data.tokens[first + 1 : end : 2] = 1 + bit
    return data
