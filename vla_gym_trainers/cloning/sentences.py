"""The instructions of training tasks and other ways to say them, as word ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vla_gym.vla.paraphrases import paraphrases
from vla_gym.vla.tokens import WordTokenizer


class Sentences:
    """For each task the original instruction and its paraphrases."""

    def __init__(self, instructions: Sequence[str], tokenize: WordTokenizer) -> None:
        """Tokenise everything once.

        Args:
            instructions: One per task, in the order of the task indices.
            tokenize: The policy's tokenizer.
        """
        variants = [[text, *paraphrases(text)] for text in instructions]
        flat = tokenize([text for texts in variants for text in texts])
        self._ids = flat  # (all sentences, W), 0 = padding
        self._counts = np.array([len(texts) for texts in variants])
        self._first = np.cumsum(self._counts) - self._counts

    def originals(self, tasks: np.ndarray) -> torch.Tensor:
        """Return the word ids (B, W) of the instructions of tasks (B,)."""
        return self._trim(self._ids[self._first[tasks]])

    def draw(self, tasks: np.ndarray, rate: float, rng: np.random.Generator) -> torch.Tensor:
        """Return a sentence for each task: with probability ``rate`` one of its paraphrases.

        Args:
            tasks: (B,) task indices.
            rate: Probability of a paraphrase, in [0, 1].
            rng: Source of the draws.

        Returns:
            (B, W) int64 word ids, 0 = padding.
        """
        chance, which = rng.random((2, len(tasks)))
        others = self._counts[tasks] - 1
        variant = np.where(chance < rate, np.minimum(1 + which * others, others), 0).astype(int)
        return self._trim(self._ids[self._first[tasks] + variant])

    @staticmethod
    def _trim(ids: torch.Tensor) -> torch.Tensor:
        """Cut the columns that are padding in every row."""
        return ids[:, : max(1, int((ids > 0).sum(1).max()))]
