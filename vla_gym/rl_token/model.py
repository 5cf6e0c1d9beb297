"""Encoder and decoder of the RL token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import nn

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import Fraction, Layers, Object, Size, check_fields, to_type
from vla_gym.rl_token.linear_path import BATCH, LinearPath, rank_for
from vla_gym.vla.blocks import Block, check_heads
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import read_json, verify_checksums, write_checkpoint
from vla_gym.vla.load_weights import described_by, load_into


@dataclass(frozen=True)
class RLTokenModelConfig:
    """Sizes of an RL token.

    Attributes:
        hidden_size: Size H of the VLA's hidden states.
        max_tokens: Largest number M of hidden states per observation.
        dim: Size D of the RL token.
        width: Width of the encoder's and the decoder's transformer.
        encoder_layers: Blocks of the encoder.
        decoder_layers: Blocks of the decoder.
        num_heads: Attention heads of a block.
        context_dropout: Probability that a training example's decoder sees none of the previous
            states. With all of them always in sight it can copy its neighbours and the token
            learns nothing.
        linear_path: Whether the token is the sum of the readout and a linear map of all hidden
            states, which pretraining starts at their principal components.
        linear_rank: Numbers that the linear path first makes of each hidden state; 0: by size, none
            where all states hold at most 65,536 numbers (:func:`.linear_path.rank_for`).
    """

    hidden_size: Size
    max_tokens: Size
    dim: Size = 256
    width: Size = 128
    encoder_layers: Layers = 2
    decoder_layers: Layers = 2
    num_heads: Size = 4
    context_dropout: Fraction = 0.5
    linear_path: bool = False
    linear_rank: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_fields(self)
        check_heads(self.width, self.num_heads)
        if not 0 <= self.linear_rank <= self.hidden_size:
            raise ConfigError(
                f"Expected linear_rank from 1 to hidden_size {self.hidden_size}, or 0 to have it "
                f"chosen, got {self.linear_rank}."
            )


class _RLTokenPart(nn.Module):
    """Encoder or decoder; one checkpoint holds both."""

    prefix: ClassVar[str]
    #: Folder that it was loaded from.
    source: Path | None = None

    def __init__(self, config: RLTokenModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load the encoder, or the decoder that was saved with it, frozen, in float32.

        Raises:
            WeightsError: If a file is missing, corrupt or of another architecture, or holds no
                such part.
        """
        folder = Path(folder)
        verify_checksums(folder)
        file = folder / "config.json"
        values = read_json(file, Object)
        if values.pop("model_type", None) != "vla_gym_rl_token":
            raise WeightsError(f"Cannot load {file}: it does not describe an RL token.")
        config = to_type(values, RLTokenModelConfig, str(file), WeightsError)
        with described_by(folder), torch.device("meta"):
            part = cls(config)
        prefix = cls.prefix
        load_into(
            part,
            Checkpoint(folder / "model.safetensors"),
            dtype=torch.float32,
            rename=lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None,
        )
        part.source = folder
        return part.eval()


class RLTokenEncoder(_RLTokenPart):
    """Hidden states (B, M, H) to RL token (B, D).

    The states are standardised, projected, given a position and a learnable readout token;
    after self-attention the readout is projected to D, the linear path (if there is one) is added
    and the sum normalised to zero mean and unit variance, the scale that an actor and a critic
    like. The readout alone keeps what the attention carries through one vector of ``width``
    numbers; the linear path keeps directions in which the states vary little, such as where a
    small object lies.
    """

    prefix = "encoder."

    def __init__(self, config: RLTokenModelConfig) -> None:
        super().__init__(config)
        self.dim, self.hidden_size = config.dim, config.hidden_size
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.register_buffer("std", torch.ones(config.hidden_size))
        self.inp = nn.Linear(config.hidden_size, config.width)
        self.pos = nn.Parameter(0.02 * torch.randn(config.max_tokens, config.width))
        self.readout = nn.Parameter(0.02 * torch.randn(config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.num_heads) for _ in range(config.encoder_layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.dim)
        self.linear: LinearPath | None = None
        if config.linear_path:
            size = config.max_tokens, config.hidden_size
            self.linear = LinearPath(*size, config.dim, config.linear_rank or rank_for(*size))
        self.out_norm = nn.LayerNorm(config.dim, elementwise_affine=False)

    def fit_scale(self, hidden: torch.Tensor) -> None:
        """Take mean and standard deviation per dimension from hidden states (B, M, H).

        Raises:
            ConfigError: If there are not two states.
        """
        # In batches: thousands of a large VLA's observations are several GB in float32.
        parts, count = hidden.detach().split(BATCH), hidden[..., 0].numel()
        if count < 2:
            raise ConfigError(
                f"A standard deviation takes two hidden states or more, got {count}: collect more "
                "observations."
            )
        mean = torch.stack([part.double().sum((0, 1)) for part in parts]).sum(0) / count
        squares = torch.stack([(part - mean).square().sum((0, 1)) for part in parts]).sum(0)
        self.mean.copy_(mean)
        self.std.copy_((squares / (count - 1)).sqrt().clamp(min=1e-3))

    def fit_linear_path(self, hidden: torch.Tensor) -> None:
        """Start the linear path at the principal components of hidden states, the readout at zero.

        See :meth:`vla_gym.rl_token.linear_path.LinearPath.fit`; there must be such a path.

        Raises:
            ConfigError: If all observations have the same states, or the shape does not fit.
        """
        assert self.linear is not None
        self._check_shape(hidden)
        self.linear.fit(hidden, self.standardise)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def _check_shape(self, hidden: torch.Tensor) -> None:
        shape, config = tuple(hidden.shape), self.config
        if hidden.ndim != 3 or shape[1] > config.max_tokens or shape[2] != config.hidden_size:
            raise ConfigError(
                f"Expected hidden states (B, <= {config.max_tokens}, {config.hidden_size}), "
                f"got {shape}: use the RL token that was pretrained for this VLA."
            )

    def standardise(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (hidden - mean) / std, the space in which the decoder's error is measured."""
        return (hidden - self.mean) / self.std

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Encode, with gradients to the encoder.

        Args:
            hidden: (B, M, H) float32, M <= max_tokens.

        Returns:
            (B, D) float32.

        Raises:
            ConfigError: If the shape does not fit.
        """
        self._check_shape(hidden)
        states = self.standardise(hidden)
        x = self.inp(states) + self.pos[: states.shape[1]]
        x = torch.cat([x, self.readout.expand(len(states), 1, -1)], dim=1)
        for i, block in enumerate(self.blocks, start=1):
            # Nobody reads the other outputs of the last block.
            x = block(x, last=1 if i == len(self.blocks) else None)
        token = self.out(self.norm(x[:, -1]))
        if self.linear is not None:
            token = token + self.linear(states)
        return self.out_norm(token)

    @torch.no_grad()
    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        """Encode without gradients; see :meth:`forward`."""
        return self(hidden)

    def save_pretrained(
        self, folder: str | Path, decoder: RLTokenDecoder | None = None, half: bool = True
    ) -> None:
        """Write config.json, model.safetensors (float16 if ``half``) and SHA256SUMS.

        Acting needs no ``decoder``.
        """
        tensors = {f"encoder.{key}": value for key, value in self.state_dict().items()}
        if decoder is not None:
            tensors |= {f"decoder.{key}": value for key, value in decoder.state_dict().items()}
        config = {"model_type": "vla_gym_rl_token", **asdict(self.config)}
        write_checkpoint(Path(folder), config, tensors, half=half)


class RLTokenDecoder(_RLTokenPart):
    """RL token (B, D) to hidden states (B, M, H), autoregressively.

    Position m sees the token and, by teacher forcing, the states before m.
    """

    prefix = "decoder."

    def __init__(self, config: RLTokenModelConfig) -> None:
        super().__init__(config)
        self.token_in = nn.Linear(config.dim, config.width)
        self.state_in = nn.Linear(config.hidden_size, config.width)
        self.hidden_context = nn.Parameter(0.02 * torch.randn(config.width))
        self.pos = nn.Parameter(0.02 * torch.randn(config.max_tokens, config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.num_heads) for _ in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.hidden_size)

    def forward(
        self, token: torch.Tensor, states: torch.Tensor, drop: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Predict every state from the token and the true states before it.

        Args:
            token: (B, D).
            states: (B, M, H) standardised hidden states; position m never sees states m and
                later.
            drop: (B,) bool: rows that see no previous state at all; None draws them with
                probability ``context_dropout`` in training mode and keeps all otherwise.

        Returns:
            (B, M, H) predicted standardised states.
        """
        count = states.shape[1]
        if drop is None:
            rate = self.config.context_dropout if self.training else 0.0
            drop = torch.rand(len(token), device=token.device) < rate
        context = self.state_in(states[:, : count - 1].detach())
        context = torch.where(drop[:, None, None], self.hidden_context, context)
        x = torch.cat([self.token_in(token)[:, None], context], dim=1) + self.pos[:count]
        for block in self.blocks:
            x = block(x, causal=True)
        return self.out(self.norm(x))

    @torch.no_grad()
    def generate(self, token: torch.Tensor, count: int) -> torch.Tensor:
        """Rebuild ``count`` standardised states from the token alone, each from those before."""
        states = token.new_zeros(len(token), count, self.config.hidden_size)
        keep = torch.zeros(len(token), dtype=torch.bool, device=token.device)
        for m in range(count):
            states[:, m] = self(token, states[:, : m + 1], drop=keep)[:, m]
        return states
