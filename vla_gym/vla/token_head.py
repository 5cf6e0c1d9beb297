"""Drawing and scoring tokens, for backends that compute all logits of a chunk in one pass."""

from __future__ import annotations

import numpy as np
import torch

from vla_gym.vla.base import TokenOutput
from vla_gym.vla.tokens import sample_tokens, token_log_probs


class OnePassTokens:
    """What :class:`~vla_gym.vla.base.TokenVLA` asks for, on top of ``token_outputs``."""

    def token_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> TokenOutput:
        """Run the network once; the backend's own."""
        raise NotImplementedError

    @torch.no_grad()
    def act_tokens(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one chunk of action tokens per row; see :class:`~vla_gym.vla.base.TokenVLA`.

        Raises:
            ConfigError: If inputs do not fit, or the temperature is negative.
        """
        logits = self.token_outputs(images, instructions, proprio).logits
        tokens = sample_tokens(logits, temperature, generator)
        return tokens, token_log_probs(logits, tokens, temperature)

    def token_log_probs(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        tokens: torch.Tensor,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Return log-probabilities of tokens; see :class:`~vla_gym.vla.base.TokenVLA`.

        Raises:
            ConfigError: If inputs do not fit, or the temperature is negative.
        """
        logits = self.token_outputs(images, instructions, proprio).logits
        return token_log_probs(logits, tokens.to(logits.device), temperature)
