"""A small world model: a GRU over what a frozen VLA saw, a transformer over the frame's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import ChunkLength, ImageSide, Object, Size, SomeLayers, check_fields, to_type
from vla_gym.vla.base import CAMERAS, PROPRIO_SIZE, FrozenVLA
from vla_gym.vla.blocks import Block, check_heads
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import read_json, verify_checksums, write_checkpoint
from vla_gym.vla.load_weights import described_by, load_into
from vla_gym.vla.preprocess import area_downsample, proprio_features
from vla_gym_trainers.world_model.tokenizer import FrameTokenizer, TokenizerConfig

MODEL_TYPE = "vla_gym_world_model"
#: Tokens through which the predictor reads the memory.
MEMORY_TOKENS = 8


@dataclass(frozen=True)
class WorldModelSizes:
    """Sizes of a :class:`GRUWorldModel`.

    ``vla`` is the VLA whose features, of size F, it was trained on, as ``vla_gym.vla.load`` takes
    it; a state has ``memory_num_layers * memory_hidden`` numbers; without ``memory_enabled`` the
    state before is never used, so that a step knows itself alone. See also
    :class:`.protocol.WorldModel` and :class:`.config.WorldModelConfig`.
    """

    vla: str
    feature_size: Size
    proprio_size: Size = 8
    action_size: Size = 7
    chunk_len: ChunkLength = 4
    cameras: tuple[str, ...] = CAMERAS
    image_size: ImageSide = 128
    memory_hidden: Size = 256
    memory_num_layers: SomeLayers = 1
    memory_enabled: bool = True
    width: Size = 96
    num_blocks: SomeLayers = 3
    num_heads: Size = 4
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.num_heads)


class GRUWorldModel(nn.Module):
    """See :class:`.protocol.WorldModel`; the state is that of all layers of a GRU.

    The predictor adds to its logits a learnt number for the token that is there now, so it need
    not learn to copy what does not move.
    """

    def __init__(self, sizes: WorldModelSizes) -> None:
        super().__init__()
        self.sizes, code = sizes, sizes.tokenizer
        self.state_size = sizes.memory_num_layers * sizes.memory_hidden
        self.chunk_len, self.action_size = sizes.chunk_len, sizes.action_size
        self.proprio_size, self.cameras = sizes.proprio_size, sizes.cameras
        self.num_tokens, self.codebook_size = code.num_tokens, code.codebook_size
        self.image_size = sizes.image_size
        self._vla: tuple[FrozenVLA, ...] = ()
        self.tokenizer = FrameTokenizer(sizes.tokenizer)
        proprio = _proprio_inputs(np.zeros((1, sizes.proprio_size), np.float32)).shape[1]
        self.feature_mean: Tensor
        self.feature_std: Tensor
        self.proprio_mean: Tensor
        self.proprio_std: Tensor
        for name, size in (("feature", sizes.feature_size), ("proprio", proprio)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        actions = sizes.chunk_len * sizes.action_size
        hidden, width = sizes.memory_hidden, sizes.width
        self.inp = nn.Linear(sizes.feature_size + proprio + actions, hidden)
        self.gru = nn.GRU(hidden, hidden, sizes.memory_num_layers, batch_first=True)
        self.embed = nn.Embedding(code.codebook_size, width)
        self.position = nn.Parameter(0.02 * torch.randn(code.num_tokens, width))
        self.recall = nn.Linear(self.state_size, MEMORY_TOKENS * width)
        self.act = nn.Linear(actions, width)
        self.blocks = nn.ModuleList(Block(width, sizes.num_heads) for _ in range(sizes.num_blocks))
        self.norm = nn.LayerNorm(width)
        self.out, self.stay = nn.Linear(width, code.codebook_size), nn.Linear(width, 1)

    @property
    def vla(self) -> FrozenVLA:
        """The VLA whose features it takes, loaded when it is first needed.

        Raises:
            ConfigError: If it is a class of somebody's own: give it with :meth:`use_vla`, or by
                name to who loads the model.
        """
        if not self._vla:
            from vla_gym.vla import load

            # The name comes from a file.
            device = str(self.position.device)
            self._vla = (load(self.sizes.vla, device=device, allow_class=False),)
        return self._vla[0]

    def use_vla(self, vla: FrozenVLA) -> None:
        """Take features from a VLA that is loaded already.

        Raises:
            ConfigError: If its hidden states have another size.
        """
        if vla.hidden_size != self.sizes.feature_size:
            raise ConfigError(
                f"The world model was trained on {self.sizes.feature_size} features of the VLA "
                f"{self.sizes.vla!r}, got {vla.name!r:.80} with {vla.hidden_size}."
            )
        # In a tuple: a VLA that is a module itself would become a part of this one.
        self._vla = (vla,)

    # The protocol

    @torch.no_grad()
    def features(
        self, views: Mapping[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> Tensor:
        """Return the mean of the VLA's last hidden states, (B, F) float32."""
        seen = {name: views[name] for name in self.cameras}
        return self.vla.infer(seen, instructions, proprio).hidden.mean(dim=1).float()

    def tokens(self, frames: np.ndarray) -> Tensor:
        """Return the tokens (B, P) int64 of frames (B, H, W, 3) uint8 of the wrist camera."""
        small = area_downsample(frames, self.sizes.tokenizer.frame_size)
        return self.tokenizer.tokens(torch.from_numpy(small).to(self.position.device))

    def decode(self, tokens: Tensor) -> np.ndarray:
        """Return the frames (B, S, S, 3) uint8 of tokens (B, P), or of probabilities (B, P, K)."""
        return self.tokenizer.decode(tokens.to(self.position.device)).cpu().numpy()

    def initial_state(self, n: int) -> Tensor:
        """Return zeros (n, S)."""
        return self.position.new_zeros(n, self.state_size)

    def update(
        self, state: Tensor, features: Tensor, proprio: Tensor, last_action: Tensor
    ) -> Tensor:
        """Return the states (B, S) after one more observation."""
        if not self.sizes.memory_enabled:
            state = torch.zeros_like(state)
        body = torch.from_numpy(_proprio_inputs(proprio.cpu().numpy())).to(state.device)
        seen = [
            (features - self.feature_mean) / self.feature_std,
            (body - self.proprio_mean) / self.proprio_std,
            last_action,
        ]
        x = F.gelu(self.inp(torch.cat(seen, dim=1)))
        layers = state.view(len(state), self.sizes.memory_num_layers, -1).transpose(0, 1)
        _, after = self.gru(x[:, None], layers.contiguous())
        return after.transpose(0, 1).flatten(1)

    def logits(self, state: Tensor, tokens: Tensor, action: Tensor) -> Tensor:
        """Return logits (B, P, K) of the next frame's tokens."""
        memory = self.recall(state).unflatten(1, (MEMORY_TOKENS, -1))
        x = self.embed(tokens) + self.position + self.act(action)[:, None]
        x = torch.cat([memory, x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.norm(self.blocks[-1](x, last=tokens.shape[1]))
        return self.out(x).scatter_add(2, tokens[..., None], self.stay(x))

    # Scale and files

    def fit_scale(self, features: np.ndarray, proprio: np.ndarray) -> None:
        """Take mean and standard deviation of the inputs (N, F) and (N, proprio size)."""
        for name, rows in (("feature", features), ("proprio", _proprio_inputs(proprio))):
            values = torch.from_numpy(rows).double()
            getattr(self, f"{name}_mean").copy_(values.mean(0))
            # The floor keeps noise on nearly constant numbers from being blown up.
            getattr(self, f"{name}_std").copy_(values.std(0).clamp(min=0.02))

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json, model.safetensors (float32) and SHA256SUMS."""
        config = {"model_type": MODEL_TYPE, **asdict(self.sizes)}
        # In 32 bits: a rounded codebook would give other tokens than those it was trained on.
        write_checkpoint(folder, config, self.state_dict(), half=False)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str = "cpu") -> Self:
        """Load a folder that :meth:`save_pretrained` wrote, frozen.

        Raises:
            WeightsError: If a file is missing, damaged or another model's.
        """
        folder = Path(folder)
        verify_checksums(folder)
        values = read_json(folder / "config.json", Object)
        if values.pop("model_type", None) != MODEL_TYPE:
            raise WeightsError(
                f"{folder} holds no world model: expected the model/ folder of a run of "
                "'vla-gym-train world-model', whose config.json has model_type "
                f"{MODEL_TYPE!r}."
            )
        sizes = to_type(values, WorldModelSizes, str(folder / "config.json"), WeightsError)
        with described_by(folder), torch.device("meta"):
            model = cls(sizes)
        load_into(model, Checkpoint(folder), device=device, dtype=torch.float32)
        return model.eval().requires_grad_(False)


def _proprio_inputs(proprio: np.ndarray) -> np.ndarray:
    """Return LIBERO's proprioception without the jumps of its axis-angle; others' as it is."""
    return proprio_features(proprio) if proprio.shape[1] == PROPRIO_SIZE else proprio
