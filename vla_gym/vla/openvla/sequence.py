"""OpenVLA's prompts, and the sequences of embeddings that its Llama reads.

A sequence is ``<s>``, the patches of every view (and a token of proprioception), the rest of the
prompt with the "empty" token 29871 at its end, and what the decoding adds: OpenVLA-OFT 56 empty
placeholders and ``</s>``, OpenVLA the action tokens so far. Rows of different lengths are padded at
their end: for attention in both directions a mask hides the padding, for causal attention nothing
real ever sees it. Positions therefore count from 0 in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import one_line
from vla_gym.vla.openvla.model import OpenVLAModel

#: Ids of Llama 2's vocabulary.
START, STOP, EMPTY = 1, 2, 29871
NOTHING = -1  # stands for an embedding of zeros

#: From a text to ids.
Tokenizer = Callable[[str], list[int]]


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer of a file tokenizer.json, or of the one in a folder.

    Raises:
        WeightsError: If it is missing or damaged.
    """
    file = Path(source)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise WeightsError(
            f"No tokenizer {file}: copy tokenizer.json from where the checkpoint was published, or "
            "give tokenizer='/path/to/tokenizer.json' of another Llama 2."
        )
    from tokenizers import Tokenizer as FastTokenizer

    try:
        tokenizer = FastTokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare ones, and panics, which are no Exception
        raise WeightsError(f"Cannot read the tokenizer {file}: {one_line(error)}") from error
    return lambda text: list(tokenizer.encode(text).ids)


class Prompts:
    """Instructions to ids of Llama 2's vocabulary, all below its size; remembered."""

    def __init__(self, tokenize: Tokenizer, vocab_size: int) -> None:
        self._tokenize = tokenize
        self._vocab_size = vocab_size
        self._ids = lru_cache(4096)(self._encode)

    def __call__(self, instructions: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ids of each instruction's prompt, from ``<s>`` to 29871.

        Raises:
            WeightsError: If the tokenizer gives ids outside the model's vocabulary.
        """
        return [self._ids(instruction) for instruction in instructions]

    def _encode(self, instruction: str) -> tuple[int, ...]:
        text = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
        ids = tuple(self._tokenize(text))
        ids = ids if ids[:1] == (START,) else (START, *ids)
        if not all(0 <= i < self._vocab_size for i in ids):
            raise WeightsError(
                f"The tokenizer gives ids up to {max(ids)}, the model has {self._vocab_size}: it "
                "is not this checkpoint's tokenizer."
            )
        return ids if ids[-1] == EMPTY else (*ids, EMPTY)


class Sequences(NamedTuple):
    """Padded sequences of embeddings.

    Attributes:
        embeddings: (B, N, H).
        lengths: (B,) int64, without padding.
        rows: (B, R) int64, positions of the states that predict actions.
        padded: Whether any row is shorter than N.
    """

    embeddings: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    padded: bool

    @property
    def positions(self) -> torch.Tensor:
        """(1, N)."""
        return torch.arange(self.embeddings.shape[1], device=self.embeddings.device)[None]

    @property
    def mask(self) -> torch.Tensor | None:
        """(B, 1, 1, N) bool, True for what is no padding; None if there is none."""
        if not self.padded:
            return None
        return (self.positions < self.lengths[:, None])[:, None, None]


def make_sequences(
    model: OpenVLAModel,
    observed: torch.Tensor,
    prompts: Sequence[tuple[int, ...]],
    after: Sequence[Sequence[int]],
    num_states: int,
    pad_prompt_to: int | None = None,
) -> Sequences:
    """Put together what the Llama reads.

    The states that predict actions begin at 29871, the end of the prompt, not at what follows it:
    shifted by one, as next-token predictions are.

    Args:
        model: Embeds.
        observed: (B, P, H): patches and proprioception.
        prompts: Ids of each row.
        after: Ids that follow each prompt, as many in every row; :data:`NOTHING` for a placeholder.
        num_states: Number R of states that predict actions.
        pad_prompt_to: Length that all prompts are padded to, so that shapes never change; None for
            that of the longest.

    Raises:
        ConfigError: If a prompt is longer than ``pad_prompt_to``.
    """
    longest = max(map(len, prompts))
    if pad_prompt_to is not None and longest > pad_prompt_to:
        raise ConfigError(
            f"A prompt has {longest} tokens, more than pad_prompt_to={pad_prompt_to}: raise it."
        )
    texts = [(*ids, *follow) for ids, follow in zip(prompts, after, strict=True)]
    width = (pad_prompt_to or longest) + len(after[0])
    ids = torch.full((len(texts), width), NOTHING, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    ids = ids.to(observed.device, non_blocking=True)
    # Times zero rather than set to it: the same for gradients, and what training did.
    embedded = model.embed_tokens(ids.clamp(min=0)) * (ids != NOTHING)[..., None]
    embeddings = torch.cat([embedded[:, :1], observed, embedded[:, 1:]], dim=1)
    lengths = torch.tensor([observed.shape[1] + len(text) for text in texts])
    lengths = lengths.to(observed.device, non_blocking=True)
    first = lengths - len(after[0]) - 1
    rows = first[:, None] + torch.arange(num_states, device=first.device)
    padded = pad_prompt_to is not None or min(map(len, prompts)) < longest
    return Sequences(embeddings, lengths, rows, padded)
