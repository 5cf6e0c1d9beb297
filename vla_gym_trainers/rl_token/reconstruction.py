"""How well an RL token's decoder reconstructs the VLA's hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_gym.rl_token import RLTokenDecoder, RLTokenEncoder

# States in a forward pass.
REPORT_BATCH = 256
#: The ways of :func:`report` in words.
WAYS = {
    "token": "the token alone",
    "context": "the token and the true previous states",
    "context_wrong_token": "another observation's token and the true previous states",
    "context_zero_token": "zeros and the true previous states",
    "generated": "the token and its own previous predictions",
}


@torch.no_grad()
def report(
    encoder: RLTokenEncoder, decoder: RLTokenDecoder, hidden: torch.Tensor
) -> dict[str, float]:
    """Measure the reconstruction of states (N, M, H), N >= 2, in the :data:`WAYS`.

    How far ``context_wrong_token`` and ``context_zero_token`` (the token's mean over its
    dimensions) are from ``context`` says how much the decoder uses the token when it could do
    without.

    Returns:
        ``<way>_mse`` (in standardised units) and ``<way>_explained_variance``.
    """
    encoder.eval()
    decoder.eval()
    device = encoder.mean.device
    batches = [part.float().to(device) for part in hidden.split(REPORT_BATCH)]
    tokens = torch.cat([encoder.encode(part) for part in batches])
    states = torch.cat([encoder.standardise(part) for part in batches])
    # Half the set away: another episode, and mostly another task.
    others = tokens.roll(len(tokens) // 2, 0)

    def decoded(some: torch.Tensor, alone: bool) -> torch.Tensor:
        parts = []
        pairs = zip(some.split(REPORT_BATCH), states.split(REPORT_BATCH), strict=True)
        for token, truth in pairs:
            drop = torch.full((len(token),), alone, device=device)
            parts.append(decoder(token, truth, drop=drop))
        return torch.cat(parts)

    ways = {
        "token": decoded(tokens, alone=True),
        "context": decoded(tokens, alone=False),
        "context_wrong_token": decoded(others, alone=False),
        "context_zero_token": decoded(torch.zeros_like(tokens), alone=False),
        "generated": torch.cat(
            [decoder.generate(part, states.shape[1]) for part in tokens.split(REPORT_BATCH)]
        ),
    }
    result = {}
    for way, predicted in ways.items():
        result[f"{way}_mse"] = float(F.mse_loss(predicted, states))
        result[f"{way}_explained_variance"] = explained_variance(predicted, states)
    return result


def explained_variance(predicted: Tensor, states: Tensor) -> float:
    """Return ``1 - sum |predicted - states|^2 / sum |states - mean(states)|^2``, both (N, M, H).

    The mean is that of each of the M * H numbers: 0 is what it predicts, 1 a perfect prediction.
    """
    total = (states - states.mean(0)).square().sum().clamp(min=1e-12)
    return float(1.0 - (predicted - states).square().sum() / total)


def format_reports(card: dict[str, Any]) -> str:
    """Return a Markdown table of :func:`train_rl_token`'s card: explained variance each way."""
    tokens = card["results"]["tokens"]
    heads = [f"context dropout {token['context_dropout']:g}" for token in tokens]
    lines = ["| the decoder sees | " + " | ".join(heads) + " |"]
    lines.append("| --- |" + " ---: |" * len(tokens))
    for way, words in WAYS.items():
        cells = [
            f"{token[f'{way}_explained_variance']:.3f} (error {token[f'{way}_mse']:.3f})"
            for token in tokens
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
