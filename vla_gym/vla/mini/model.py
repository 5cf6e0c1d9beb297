"""The network of the embedded VLA.

Two 64x64 images, the instruction and the proprioception become tokens of a small transformer;
eight learned action queries are read out by an L1 head, by a 256-bin token head and, in some
checkpoints, by a flow head. The structure
is that of large VLAs (action-query hidden states are what the RL token compresses), the size is
that of a test bed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import nn

from vla_gym.errors import WeightsError
from vla_gym.outside import ChunkLength, Layers, Object, Size, to_type
from vla_gym.vla.base import ACTION_SIZE, CAMERAS
from vla_gym.vla.blocks import Block, CameraStem
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import read_json, verify_checksums, write_checkpoint
from vla_gym.vla.load_weights import described_by, load_into
from vla_gym.vla.tokens import NUM_BINS, PAD, UNK

PROPRIO_FEATURES = 11


Words = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(min_length=2, max_length=10**5)]
ActionStatistics = Annotated[list[float], Meta(min_length=ACTION_SIZE, max_length=ACTION_SIZE)]
ProprioStatistics = Annotated[
    list[float], Meta(min_length=PROPRIO_FEATURES, max_length=PROPRIO_FEATURES)
]


@dataclass
class MiniVLAConfig:
    """Configuration of :class:`MiniVLA`; everything inference needs is in it.

    Attributes:
        vocabulary: Words in the order of their ids, starting with padding and unknown.
        max_words: Longer instructions are cut.
        hidden_size: Width of the transformer.
        num_layers: Number of transformer blocks.
        num_heads: Attention heads of a block.
        tokens_per_camera: Tokens that a camera's feature map is projected to.
        stem_channels: Channels of the 4x4 feature map before that projection.
        horizon: Number C of actions in a chunk = number of action queries.
        flow_layers: Transformer blocks of the flow head; 0: there is none.
        flow_steps: Denoising steps of the flow head.
        action_mean: Mean of the 7 numbers of the training data's actions, for the flow head.
        action_std: Their standard deviation: the flow head works on standardised actions.
        proprio_mean: Mean of the 11 proprioception features of the training data.
        proprio_std: Their standard deviation.
        model_type: Tells :func:`vla_gym.vla.load` the backend.
    """

    vocabulary: Words = field(default_factory=lambda: [PAD, UNK])
    max_words: Annotated[int, Meta(ge=1, le=1024)] = 24
    hidden_size: Size = 192
    num_layers: Layers = 4
    num_heads: Size = 4
    tokens_per_camera: Size = 4
    stem_channels: Size = 48
    horizon: ChunkLength = 8
    flow_layers: Layers = 0
    flow_steps: ChunkLength = 5
    action_mean: ActionStatistics = field(default_factory=lambda: [0.0] * ACTION_SIZE)
    action_std: ActionStatistics = field(default_factory=lambda: [1.0] * ACTION_SIZE)
    proprio_mean: ProprioStatistics = field(default_factory=lambda: [0.0] * PROPRIO_FEATURES)
    proprio_std: ProprioStatistics = field(default_factory=lambda: [1.0] * PROPRIO_FEATURES)
    model_type: Literal["vla_gym_mini"] = "vla_gym_mini"

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: object) -> MiniVLAConfig:
        """Return what a file tells; transformers, with which older ones were written, adds keys.

        Raises:
            WeightsError: If a value is of another type or out of range.
        """
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return to_type(known, cls, str(origin), WeightsError)


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


class MiniVLA(nn.Module):
    """The network; see the module docstring."""

    def __init__(self, config: MiniVLAConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.stems = nn.ModuleList(
            CameraStem(width, config.tokens_per_camera, config.stem_channels) for _ in CAMERAS
        )
        self.camera_pos = nn.Parameter(
            0.02 * torch.randn(len(CAMERAS), config.tokens_per_camera, width)
        )
        self.word_embedding = nn.Embedding(len(config.vocabulary), width, padding_idx=0)
        self.word_pos = nn.Parameter(0.02 * torch.randn(config.max_words, width))
        self.proprio_mlp = nn.Sequential(
            nn.Linear(PROPRIO_FEATURES, width), nn.GELU(), nn.Linear(width, width)
        )
        self.queries = nn.Parameter(0.02 * torch.randn(config.horizon, width))
        self.blocks = nn.ModuleList(
            Block(width, config.num_heads) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.action_head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, ACTION_SIZE)
        )
        self.token_head = nn.Linear(width, ACTION_SIZE * NUM_BINS)
        self.flow_head: FlowHead | None = None
        if config.flow_layers:
            self.flow_head = FlowHead(width, config.num_heads, config.flow_layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.queries.device

    def forward(
        self,
        pixel_values: torch.Tensor,
        input_ids: torch.Tensor,
        proprio: torch.Tensor,
    ) -> torch.Tensor:
        """Return the normalised states (B, C, hidden_size) of the action queries.

        All heads read them: ``action_head`` gives actions (B, C, 7) before clipping and gripper
        sign.

        Args:
            pixel_values: (B, 2, 3, 64, 64) float in [-0.5, 0.5], agentview then wrist.
            input_ids: (B, W) word ids, 0 = padding.
            proprio: (B, 11) features of :func:`~vla_gym.vla.preprocess.proprio_features`,
                not normalised.
        """
        batch, words = input_ids.shape
        mean = proprio.new_tensor(self.config.proprio_mean)
        std = proprio.new_tensor(self.config.proprio_std)
        tokens = [
            stem(pixel_values[:, i]) + self.camera_pos[i] for i, stem in enumerate(self.stems)
        ]
        tokens += [
            self.proprio_mlp((proprio - mean) / std)[:, None],
            self.word_embedding(input_ids) + self.word_pos[:words],
            self.queries.expand(batch, -1, -1),
        ]
        x = torch.cat(tokens, dim=1)
        real, mask = input_ids > 0, None
        if not bool(real.all()):
            keep = real.new_ones(batch, x.shape[1])
            first = x.shape[1] - self.config.horizon - words
            keep[:, first : first + words] = real
            mask = keep[:, None, None, :]
        for i, block in enumerate(self.blocks, start=1):
            # Nobody reads the other tokens after the last block.
            x = block(x, mask, last=self.config.horizon if i == len(self.blocks) else None)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the token head's logits (B, C, 7, 256) of states (B, C, hidden_size)."""
        logits: torch.Tensor = self.token_head(hidden)
        return logits.unflatten(-1, (ACTION_SIZE, NUM_BINS))

    def save_pretrained(self, folder: Path, half: bool = True) -> None:
        """Write config.json, model.safetensors (float16 if ``half``) and SHA256SUMS."""
        write_checkpoint(folder, asdict(self.config), self.state_dict(), half=half)


def to_pixel_values(stacked: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Turn images (B, 2, 64, 64, 3) uint8 into the network's (B, 2, 3, 64, 64) float input."""
    images = torch.as_tensor(stacked).permute(0, 1, 4, 2, 3)
    return images.float() / 255.0 - 0.5


def load_model(folder: Path) -> MiniVLA:
    """Load the network in float32.

    Raises:
        WeightsError: If the files are corrupt or do not fit the architecture.
    """
    verify_checksums(folder)
    file = folder / "config.json"
    config = MiniVLAConfig.of(read_json(file, Object), file)
    with described_by(folder), torch.device("meta"):
        model = MiniVLA(config)
    load_into(model, Checkpoint(folder), dtype=torch.float32)
    return model.eval().requires_grad_(True)
