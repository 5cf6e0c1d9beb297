"""Words to ids, and actions to 256 bins as OpenVLA's action tokenizer does it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vla_gym.errors import ConfigError

PAD, UNK = "<pad>", "<unk>"
NUM_BINS = 256


def split_words(instruction: str) -> list[str]:
    """Return the lower-case words of an instruction; underscores and punctuation separate."""
    return re.findall(r"[a-z0-9]+", instruction.lower())


def build_vocabulary(instructions: Iterable[str]) -> list[str]:
    """Return the sorted words of all instructions, after the padding and the unknown word."""
    return [PAD, UNK, *sorted({word for text in instructions for word in split_words(text)})]


class WordTokenizer:
    """Word-level tokenizer: one id per word, id 0 = padding, id 1 = any unknown word.

    The vocabulary starts with those two; longer instructions than ``max_words`` lose their end.
    """

    def __init__(self, vocabulary: Sequence[str], max_words: int) -> None:
        self._ids = {word: i for i, word in enumerate(vocabulary)}
        self._max_words = max_words

    def __call__(self, instructions: Sequence[str]) -> torch.Tensor:
        """Return ids (B, W) int64, padded with 0 to the longest instruction of the batch."""
        unknown = self._ids[UNK]
        rows = []
        for text in instructions:
            words = split_words(text)[: self._max_words]
            rows.append(torch.tensor([self._ids.get(word, unknown) for word in words] or [0]))
        return pad_sequence(rows, batch_first=True)


def _edges(device: torch.device) -> torch.Tensor:
    # NumPy's float64 values, as OpenVLA's; torch's own linspace rounds some of them differently.
    return torch.from_numpy(np.linspace(-1.0, 1.0, NUM_BINS)).to(device)


def actions_to_bins(actions: torch.Tensor) -> torch.Tensor:
    """Return the bin index (0..255, int64) of every action value; values outside are clipped.

    256 edges make 255 intervals; bin 255 holds exactly 1.0, an oddity that OpenVLA's tokenizer
    has too and that keeps token ids compatible.
    """
    edges = _edges(actions.device)
    return torch.bucketize(actions.double().clamp(-1, 1).contiguous(), edges, right=True) - 1


def bins_to_actions(bins: torch.Tensor) -> torch.Tensor:
    """Return the centre of every bin (float32); bin 255 shares the last interval's centre."""
    edges = _edges(bins.device)
    centres = (edges[1:] + edges[:-1]) / 2
    return centres[bins.clamp(0, NUM_BINS - 2)].float()


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature < 0.0:
        raise ConfigError(f"Expected temperature >= 0, got {temperature}.")
    return logits.float() / temperature if temperature > 0.0 else logits.float()


def sample_tokens(
    logits: torch.Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw tokens from softmax(logits / temperature).

    Args:
        logits: (..., 256).
        temperature: 0 takes the most likely token of each.
        generator: Source of the draws, on the CPU; None: torch's global one.

    Returns:
        (...) int64 on the device of the logits.

    Raises:
        ConfigError: If the temperature is negative.
    """
    scaled = _scaled(logits, temperature)
    if temperature == 0.0:
        return scaled.argmax(dim=-1)
    # Drawn on the CPU whatever the device, so that a seed gives the same tokens everywhere.
    uniform = torch.rand(scaled.shape, generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-300)))
    return (scaled.double() + gumbel.to(scaled.device)).argmax(dim=-1)


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return log softmax(logits / temperature) at the tokens.

    Args:
        logits: (..., 256); gradients flow into them.
        tokens: (...) int64, 0..255.
        temperature: The one that they were drawn with; 0 (greedy) counts as 1.

    Returns:
        (...) float32.

    Raises:
        ConfigError: If the temperature is negative, or there are not as many tokens as logits.
    """
    if tokens.shape != logits.shape[:-1]:
        raise ConfigError(f"Expected tokens {tuple(logits.shape[:-1])}, got {tuple(tokens.shape)}.")
    scaled = _scaled(logits, temperature).log_softmax(dim=-1)
    return scaled.gather(-1, tokens[..., None]).squeeze(-1)
