"""OpenVLA: one action of seven tokens, one token after the other (arXiv 2406.09246)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache

from vla_gym.errors import ConfigError
from vla_gym.vla.base import ACTION_SIZE, VLAOutput
from vla_gym.vla.openvla.base import OpenVLABase, OpenVLAOptions, Parts
from vla_gym.vla.openvla.llama_layers import run_layers
from vla_gym.vla.openvla.sequence import make_sequences
from vla_gym.vla.tokens import sample_tokens, token_log_probs


class OpenVLABackend(OpenVLABase):
    """:class:`~vla_gym.vla.base.TokenVLA` over an OpenVLA checkpoint; chunks of one action.

    The hidden states are those that predict the seven tokens. Only the 256 action ids compete;
    the reference decodes over the whole vocabulary, which a trained policy makes no use of. The
    Llama is never compiled: its keys and values grow with every token, each length would be anew.
    """

    epsilon = 0.0
    heads = ("token",)
    head = "token"

    def __init__(self, parts: Parts, options: OpenVLAOptions, compile: bool = False) -> None:
        super().__init__(parts, options, horizon=1, num_views=1, compile=compile)

    def generate(
        self,
        patches: torch.Tensor,
        prompts: Sequence[tuple[int, ...]],
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw the tokens of one action.

        Args:
            patches: (B, P, H).
            prompts: Ids of each row.
            temperature: 0 takes the most likely tokens.
            generator: Source of the draws, on the CPU.

        Returns:
            hidden (B, 7, H), logits (B, 7, 256) float32 and tokens (B, 7) int64 in 0..255.
        """
        model = self.model
        sequences = make_sequences(model, patches, prompts, [()] * len(prompts), 1)
        seen = DynamicCache()
        state = run_layers(
            model.llama,
            sequences.embeddings,
            sequences.positions,
            rows=sequences.rows,
            causal=True,
            seen=seen,
        )
        real = sequences.positions < sequences.lengths[:, None]
        first = torch.zeros_like(sequences.rows)
        states, logits, tokens = [state], [model.action_logits(state)], []
        while True:
            tokens.append(sample_tokens(logits[-1], temperature, generator))
            if len(tokens) == ACTION_SIZE:
                break
            # Keys of padding, which stand between the prompt's and the new ones, stay hidden.
            real = torch.cat([real, torch.ones_like(real[:, :1])], dim=1)
            state = run_layers(
                model.llama,
                model.embed_tokens(model.action_ids(tokens[-1])),
                sequences.lengths[:, None] + len(tokens) - 1,
                rows=first,
                mask=real[:, None, None] if sequences.padded else None,
                seen=seen,
            )
            states.append(state)
            logits.append(model.action_logits(state))
        return torch.cat(states, dim=1), torch.cat(logits, dim=1), torch.cat(tokens, dim=1)

    @torch.no_grad()
    def infer(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,  # noqa: ARG002
    ) -> VLAOutput:
        """Predict one action per row; see :class:`~vla_gym.vla.base.FrozenVLA`."""
        patches = self.embed_images(images, instructions)
        hidden, _, tokens = self.generate(patches, self.prompts(instructions))
        return VLAOutput(hidden.float(), self.tokens_to_actions(tokens[:, None]))

    @torch.no_grad()
    def act_tokens(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,  # noqa: ARG002
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the tokens of one action per row; see :class:`~vla_gym.vla.base.TokenVLA`."""
        patches, prompts = self.embed_images(images, instructions), self.prompts(instructions)
        _, logits, tokens = self.generate(patches, prompts, temperature, generator)
        return tokens[:, None], token_log_probs(logits, tokens, temperature)[:, None]

    def token_log_probs(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,  # noqa: ARG002
        tokens: torch.Tensor,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Return log-probabilities of tokens; see :class:`~vla_gym.vla.base.TokenVLA`.

        All seven in one forward pass, each given those before it.
        """
        batch = len(instructions)
        if tokens.shape != (batch, 1, ACTION_SIZE):
            raise ConfigError(f"Expected tokens ({batch}, 1, 7), got {tuple(tokens.shape)}.")
        patches = self.embed_images(images, instructions)
        given = self.model.action_ids(tokens[:, 0, :-1]).tolist()
        prompts = self.prompts(instructions)
        sequences = make_sequences(self.model, patches, prompts, given, ACTION_SIZE)
        hidden = run_layers(
            self.model.llama,
            sequences.embeddings,
            sequences.positions,
            rows=sequences.rows,
            causal=True,
        )
        logits = self.model.action_logits(hidden)[:, None]
        return token_log_probs(logits, tokens.to(logits.device), temperature)
