"""Frames as a grid of discrete tokens: a vector-quantised autoencoder.

After VQ-VAE (van den Oord et al. 2017, arXiv 1711.00937): an encoder makes of a frame a grid of
vectors z, each is replaced by the nearest vector e of a codebook, and a decoder makes a frame of
these. The codebook follows the encoder by running averages (its appendix A.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from vla_gym.errors import ConfigError
from vla_gym.outside import ImageSide, Size, check_fields

#: Decay of the running averages that the codebook is made of.
EMA_DECAY = 0.98
#: A code that was chosen less often than so many times a batch, in the running average, is dead.
DEAD_BELOW = 0.03


@dataclass(frozen=True)
class TokenizerConfig:
    """Sizes of a tokenizer.

    Attributes:
        frame_size: Side of the frames in pixels.
        grid_size: Side of the grid of tokens; a power of two divides the frame's side into it.
        codebook_size: Codes K.
        code_size: Numbers of a code; few of them keep all codes in use.
        width: Channels of the first layer; the deeper ones have twice as many.
    """

    frame_size: ImageSide = 64
    grid_size: ImageSide = 8
    codebook_size: Annotated[int, Meta(ge=2, le=2**24)] = 512
    code_size: Size = 16
    width: Size = 32

    def __post_init__(self) -> None:
        check_fields(self)
        factor, rest = divmod(self.frame_size, self.grid_size)
        if rest or factor < 2 or factor & (factor - 1):
            raise ConfigError(
                "Expected a frame_size that is grid_size times 2, 4, 8, ..., got "
                f"{self.frame_size} and {self.grid_size}."
            )

    @property
    def num_tokens(self) -> int:
        """Tokens P of a frame."""
        return self.grid_size**2


class Quantised(NamedTuple):
    """What the codebook makes of vectors.

    Attributes:
        codes: (B, D, G, G): the nearest codes; gradients pass to the vectors as if these were they.
        tokens: (B, P) int64: their numbers, row by row of the grid.
        commitment: Mean squared distance of the vectors to their codes, with gradients to the
            vectors.
    """

    codes: Tensor
    tokens: Tensor
    commitment: Tensor


class FrameTokenizer(nn.Module):
    """Encoder, codebook and decoder."""

    def __init__(self, config: TokenizerConfig) -> None:
        """Build a tokenizer with fresh weights; its codebook begins at the first training batch."""
        super().__init__()
        self.config = config
        deep = 2 * config.width
        halvings = (config.frame_size // config.grid_size).bit_length() - 1  # of the side
        sizes = [3, config.width, *[deep] * (halvings - 1)]
        down = [
            layer
            for i, o in zip(sizes, sizes[1:], strict=False)
            for layer in (nn.Conv2d(i, o, 4, 2, 1), nn.GELU())
        ]
        up = [
            layer
            for i, o in zip(sizes[:0:-1], sizes[-2::-1], strict=True)
            for layer in (nn.GELU(), nn.ConvTranspose2d(i, o, 4, 2, 1))
        ]
        self.encoder = nn.Sequential(
            *down, _Residual(sizes[-1]), nn.Conv2d(sizes[-1], config.code_size, 1)
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(config.code_size, sizes[-1], 3, 1, 1), _Residual(sizes[-1]), *up
        )
        self.codebook: Tensor
        self.counts: Tensor
        self.sums: Tensor
        self.register_buffer("codebook", torch.zeros(config.codebook_size, config.code_size))
        # Running averages of how often a code was chosen in a batch, and of the sum of its vectors.
        self.register_buffer("counts", torch.zeros(config.codebook_size))
        self.register_buffer("sums", torch.zeros(config.codebook_size, config.code_size))

    def quantise(self, vectors: Tensor) -> Quantised:
        """Replace vectors (B, D, G, G) by their nearest codes, argmin_k |z - e_k|."""
        flat = vectors.detach().permute(0, 2, 3, 1).flatten(0, 2)
        # |z|^2 is the same for all codes.
        distances = self.codebook.square().sum(1) - 2.0 * flat @ self.codebook.T
        tokens = distances.argmin(1).view(len(vectors), -1)
        codes = self._grid(tokens)
        commitment = F.mse_loss(vectors, codes)
        return Quantised(vectors + (codes - vectors).detach(), tokens, commitment)

    def _grid(self, tokens: Tensor) -> Tensor:
        """Return the codes (B, D, G, G) of tokens (B, P), or the mean ones of (B, P, K)."""
        codes = tokens @ self.codebook if tokens.is_floating_point() else self.codebook[tokens]
        size = self.config.grid_size
        return codes.view(-1, size, size, self.config.code_size).permute(0, 3, 1, 2)

    @torch.no_grad()
    def follow(self, vectors: Tensor, tokens: Tensor, generator: torch.Generator) -> None:
        """Move the codebook to the vectors of a batch; bring dead codes back to life.

        ``N_k <- d N_k + (1 - d) n_k``, ``m_k <- d m_k + (1 - d) sum z``, ``e_k = m_k / N_k``. A
        dead code becomes a vector of the batch, drawn at random by a generator on the CPU.
        """
        flat, chosen = vectors.permute(0, 2, 3, 1).flatten(0, 2), tokens.flatten()
        count = torch.bincount(chosen, minlength=len(self.codebook)).to(flat.dtype)
        total = torch.zeros_like(self.sums).index_add_(0, chosen, flat)
        self.counts.lerp_(count, 1.0 - EMA_DECAY)
        self.sums.lerp_(total, 1.0 - EMA_DECAY)
        self._revive(flat, generator)

    def _revive(self, flat: Tensor, generator: torch.Generator) -> None:
        """Draw dead codes anew from vectors (N, D), and take the codebook from the averages."""
        dead = torch.nonzero(self.counts < DEAD_BELOW).flatten()
        rows = torch.randint(len(flat), (len(dead),), generator=generator).to(flat.device)
        self.counts[dead], self.sums[dead] = 1.0, flat[rows]
        self.codebook.copy_(self.sums / self.counts[:, None])

    def loss(
        self, frames: Tensor, generator: torch.Generator, commitment: float
    ) -> dict[str, Tensor]:
        """Return the terms of the training loss of a batch, and move the codebook.

        ``|x - D(e)|^2 + b |z - sg(e)|^2``, eq. 3 of the paper; its middle term is the running
        average here. The codebook of the first batch is drawn from that batch. Frames are
        (B, S, S, 3) uint8; ``commitment`` is the weight b.

        Returns:
            ``loss`` with gradients, ``mse`` of pixels in [0, 1], ``codes``: share of the codebook
            that is in use.
        """
        pixels = to_pixels(frames)
        vectors = self.encoder(pixels)
        if not bool(self.counts.any()):
            with torch.no_grad():
                self._revive(vectors.permute(0, 2, 3, 1).flatten(0, 2), generator)
        found = self.quantise(vectors)
        mse = F.mse_loss(self.decoder(found.codes), pixels)
        if self.training:
            self.follow(vectors, found.tokens, generator)
        used = found.tokens.unique().numel() / len(self.codebook)
        return {
            "loss": mse + commitment * found.commitment,
            "mse": mse.detach(),
            "codes": mse.new_tensor(used),
        }

    @torch.no_grad()
    def tokens(self, frames: Tensor) -> Tensor:
        """Return the tokens (B, P) int64 of frames (B, S, S, 3) uint8."""
        return self.quantise(self.encoder(to_pixels(frames))).tokens

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Return the frames (B, S, S, 3) uint8 of tokens (B, P).

        Of probabilities (B, P, K) the expected codes are decoded, which come nearer to an uncertain
        frame than the likeliest ones, and are blurred where it is uncertain.
        """
        pixels = self.decoder(self._grid(tokens)).clamp(-0.5, 0.5)
        return ((pixels + 0.5) * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GELU(), nn.Conv2d(width, width, 3, 1, 1), nn.GELU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, G, G)."""
        return x + self.layers(x)


def to_pixels(frames: Tensor) -> Tensor:
    """Return (B, 3, S, S) float32 in [-0.5, 0.5] of frames (B, S, S, 3) uint8."""
    return frames.permute(0, 3, 1, 2).float() / 255.0 - 0.5
