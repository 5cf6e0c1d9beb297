"""The RL token's linear path: a linear map of all hidden states, in one stage or in two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from vla_gym.errors import ConfigError

#: Most inputs of the map to the token. Beyond, two stages: 56 states of 4096 numbers would take
#: 59 million weights, as principal components of few thousand observations.
MAX_INPUTS = 2**16
#: Largest rank of the first stage that is chosen by size.
MAX_RANK = 256
# Single states that the first stage is fitted to: several times the size of a large VLA's.
FIT_STATES = 8192
# Observations standardised at once while fitting.
BATCH = 64


def rank_for(max_tokens: int, hidden_size: int) -> int:
    """Return the first stage's rank for M states of size H: 0, no first stage, up to 65,536 inputs.

    Else the largest r with ``M r <= 65,536``, ``r <= H``, at least 1 and at most 256.
    """
    if max_tokens * hidden_size <= MAX_INPUTS:
        return 0
    return max(1, min(MAX_RANK, hidden_size, MAX_INPUTS // max_tokens))


class LinearPath(nn.Linear):
    """Standardised hidden states (B, <= M, H) to (B, D), ``W vec(h_1 U^T, ..., h_M U^T) + b``.

    ``U`` (r, H) is shared by all states; without it (rank 0) W maps the states themselves. States
    that are missing count as zeros, their mean. W and b start at zero.
    """

    def __init__(self, max_tokens: int, hidden_size: int, dim: int, rank: int) -> None:
        """Build the path; sizes M, H, D and r."""
        super().__init__(max_tokens * (rank or hidden_size), dim)
        self.max_tokens = max_tokens
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.project = nn.Linear(hidden_size, rank, bias=False) if rank else None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return (B, D) float32."""
        return super().forward(self._inputs(states))

    def _inputs(self, states: torch.Tensor) -> torch.Tensor:
        flat = (states if self.project is None else self.project(states)).flatten(1)
        return F.pad(flat, (0, self.in_features - flat.shape[1]))

    @torch.no_grad()
    def fit(
        self, hidden: torch.Tensor, standardise: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Start at principal components: U at those of single states, W at those of their images.

        U's are taken about each position's own mean: what a position always holds tells
        observations apart in nothing. W's component i is divided by the fourth root of its
        variance: between keeping the variances, where a network would not see the small ones, and
        making them equal, where their noise would be as loud as the scene. All are then scaled to
        a mean variance of one.

        Memory: beside ``hidden`` B M r numbers in double, or B M H without a first stage, and a
        square matrix of the smaller of rows and columns.

        Args:
            hidden: (B, <= M, H) of any float type; more components than B - 1 are zero.
            standardise: The encoder's.

        Raises:
            ConfigError: If all observations have the same states.
        """
        if all(part.equal(hidden[:1].expand_as(part)) for part in hidden.split(BATCH)):
            raise ConfigError(
                "Principal components take observations whose hidden states differ; all "
                f"{len(hidden)} have the same: collect others, or use another VLA."
            )

        def batches() -> Iterator[torch.Tensor]:
            return (standardise(part.detach().float()) for part in hidden.split(BATCH))

        if self.project is not None:
            rank = self.project.out_features
            tokens = hidden.shape[1]
            generator = torch.Generator().manual_seed(0)
            # Drawn: every k-th would be one position alone if k were a multiple of M.
            draw = torch.randperm(len(hidden) * tokens, generator=generator)[:FIT_STATES]
            mean = torch.stack([part.sum(0) for part in batches()]).sum(0) / len(hidden)
            position = draw % tokens
            states = standardise(hidden[draw // tokens, position].float()) - mean[position]
            self.project.weight.zero_()
            components = principal_components(states, rank)[1]
            self.project.weight[: len(components)] = components.float()
        flat = torch.cat([self._inputs(part) for part in batches()])
        mean = flat.mean(0)
        variances, components = principal_components(flat - mean, self.out_features)
        scale = variances**0.25 * variances.sqrt().mean().sqrt()
        self.weight.zero_()[: len(components)] = (components / scale[:, None]).float()
        self.bias.copy_(-self.weight @ mean)


def principal_components(centred: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variances (k,) and unit components (k, d) of rows (n, d) of mean zero, in double.

    k is ``count``, n - 1 or d, whichever is least; the largest first. Variances are at least 1e-6
    of the largest. The smaller of the two Gram matrices is decomposed: of rows, or of columns.
    """
    rows, size = centred.shape
    count, wide = min(count, rows - 1, size), size > rows
    centred = centred.double()
    values, vectors = torch.linalg.eigh(centred @ centred.T if wide else centred.T @ centred)
    values = values.flip(0)[:count].clamp(min=1e-6 * float(values[-1])) / rows
    vectors = vectors.flip(1)[:, :count]
    if wide:
        vectors = centred.T @ vectors / (values * rows).sqrt()
    return values, vectors.T
