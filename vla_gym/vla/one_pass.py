"""What backends have in common whose heads read the states of one forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vla_gym.vla.base import FrozenVLA, TokenOutput, TrainableTokenVLA, VLAOutput
from vla_gym.vla.tokens import sample_tokens, token_log_probs


class OnePassVLA(FrozenVLA):
    """Acts with its ``head`` by the method that this head is trained by."""

    @torch.no_grad()
    def infer(
        self: Any, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one chunk per row; see :class:`~vla_gym.vla.base.FrozenVLA`."""
        seen = images, instructions, proprio
        if self.head == "token":
            hidden, logits = self.token_outputs(*seen)
            actions = self.tokens_to_actions(logits.argmax(dim=-1))
        elif self.head == "flow":
            hidden, chunk = self.flow_outputs(*seen).integrate(self.num_steps)
            actions = self.flow_to_env(chunk)
        else:
            hidden, chunk = self.action_outputs(*seen)
            actions = self.to_env(chunk)
        # A copy, whatever the dtype: the next pass of a CUDA graph overwrites its results.
        return VLAOutput(hidden.to(torch.float32, copy=True), actions)


class OnePassTokens(OnePassVLA):
    """Draws and scores tokens by all logits of a chunk at once.

    ``hidden_states`` of observations and their ``token_logits`` are the subclass's.
    """

    def token_outputs(
        self: Any, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> TokenOutput:
        """Run the network once; see :class:`~vla_gym.vla.base.TrainableTokenVLA`."""
        hidden = self.hidden_states(images, instructions, proprio)
        return TokenOutput(hidden, self.token_logits(hidden))

    @torch.no_grad()
    def act_tokens(
        self: TrainableTokenVLA,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one chunk of action tokens per row; see :class:`~vla_gym.vla.base.TokenVLA`."""
        logits = self.token_outputs(images, instructions, proprio).logits
        tokens = sample_tokens(logits, temperature, generator)
        return tokens, token_log_probs(logits, tokens, temperature)

    def token_log_probs(
        self: TrainableTokenVLA,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        tokens: torch.Tensor,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Return log-probabilities of tokens; see :class:`~vla_gym.vla.base.TokenVLA`."""
        logits = self.token_outputs(images, instructions, proprio).logits
        return token_log_probs(logits, tokens.to(logits.device), temperature)
