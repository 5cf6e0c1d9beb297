"""OpenVLA-OFT: all tokens of a chunk at once, with attention in both directions.

After "Fine-Tuning Vision-Language-Action Models: Optimizing Speed and Success" (arXiv 2502.19645).
The reference computes one observation at a time; here rows with any instructions share a forward
pass. Not covered: FiLM and the diffusion head, which no checkpoint for LIBERO uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta

from vla_gym.errors import ConfigError
from vla_gym.outside import ChunkLength
from vla_gym.vla.base import ACTION_SIZE, PROPRIO_SIZE, ActionOutput
from vla_gym.vla.one_pass import OnePassTokens
from vla_gym.vla.openvla.base import OpenVLABase, OpenVLAOptions, Parts
from vla_gym.vla.openvla.llama_layers import run_layers
from vla_gym.vla.openvla.sequence import NOTHING, STOP, make_sequences
from vla_gym.vla.statistics import Normalizer


@dataclass(frozen=True)
class OFTOptions(OpenVLAOptions):
    """Options of ``openvla-oft``.

    Attributes:
        num_views: 1 or 2; None: 2 for a policy that reads proprioception, else 1.
        head: ``"l1"`` or ``"token"``; None: l1 where there is one.
        horizon: Actions in a chunk, as it was trained.
        append_stop: Whether ``</s>`` follows the placeholders: False for policies of RLinf.
        pad_prompt_to: Length in tokens that all prompts are padded to, so that shapes never change.
    """

    num_views: Literal[1, 2] | None = None
    head: str | None = None
    horizon: ChunkLength = 8
    append_stop: bool = True
    pad_prompt_to: Annotated[int, Meta(ge=1, le=4096)] | None = None


class OpenVLAOFTBackend(OpenVLABase, OnePassTokens):
    """:class:`~vla_gym.vla.base.TrainableTokenVLA` over an OpenVLA-OFT checkpoint.

    The hidden states are those that the action head reads: of the token before the placeholders
    and of all placeholders but the last.
    """

    Options = OFTOptions
    options: OFTOptions
    epsilon = 1e-8

    def __init__(self, parts: Parts, options: OFTOptions, compile: bool = False) -> None:
        """Put the parts of a checkpoint together; see :class:`OpenVLABase`.

        Raises:
            ConfigError: If an option does not fit the checkpoint.
        """
        self.proprio_projector = parts.proprio_projector
        # Part of the network, so that it is trained and copied with it.
        parts.model.add_module("action_head", parts.action_head)
        views = options.num_views or (1 if self.proprio_projector is None else 2)
        super().__init__(parts, options, horizon=options.horizon, num_views=views, compile=compile)
        self._run_layers: Callable[..., torch.Tensor] = run_layers
        if compile:
            self._run_layers = torch.compile(run_layers, mode=options.compile_mode)
        self.heads = ("token",) if self.action_head is None else ("l1", "token")
        self.head = options.head or self.heads[0]
        if self.head not in self.heads:
            known = " and ".join(self.heads)
            raise ConfigError(
                f"The checkpoint {self.name!r} has no head {self.head!r}, but {known}."
            )
        if self.proprio_projector is not None:
            self.proprio_normalizer = Normalizer(
                parts.statistics.get("proprio") or {}, epsilon=self.epsilon, clip=True
            )

    @property
    def action_head(self) -> Any:
        """The L1 head; None if the policy has none."""
        return self.model.action_head

    def hidden_states(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> torch.Tensor:
        """Return the states (B, M, H) that predict actions, with gradients where there are any."""
        observed = self.observe(self.embed_images(images, instructions), proprio)
        return self.decode(observed, self.prompts(instructions))

    def observe(self, patches: torch.Tensor, proprio: np.ndarray) -> torch.Tensor:
        """Append the token of proprioception (B, 8) to patches (B, P, H), if the policy has one.

        Raises:
            ConfigError: If the shape is another.
        """
        if self.proprio_projector is None:
            return patches
        if proprio.shape != (len(patches), PROPRIO_SIZE):
            raise ConfigError(f"Expected proprio ({len(patches)}, 8), got {proprio.shape}.")
        values = torch.from_numpy(np.asarray(proprio, np.float64))
        values = self.proprio_normalizer.normalize(values).to(patches.device, patches.dtype)
        return torch.cat([patches, self.proprio_projector(values)[:, None]], dim=1)

    def decode(self, observed: torch.Tensor, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Run the Llama on what was observed (B, P, H) and prompts' ids; returns (B, M, H)."""
        count, options = self.num_hidden_tokens, self.options
        after = [[NOTHING] * count + [STOP] * options.append_stop] * len(prompts)
        sequences = make_sequences(
            self.model, observed, prompts, after, count, options.pad_prompt_to
        )
        return self._run_layers(
            self.model.llama,
            sequences.embeddings,
            sequences.positions,
            rows=sequences.rows,
            mask=sequences.mask,
        )

    def action_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> ActionOutput:
        """Run the network once; see :class:`~vla_gym.vla.base.TrainableActionVLA`.

        Raises:
            ConfigError: If the policy has no L1 head.
        """
        if self.action_head is None:
            raise ConfigError(
                f"The checkpoint {self.name!r} regresses no actions: train its tokens."
            )
        hidden = self.hidden_states(images, instructions, proprio)
        return ActionOutput(hidden, self.action_head(hidden).float())

    def token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C, 7, 256) float32 of states (B, M, H)."""
        return self.model.action_logits(hidden).unflatten(1, (self.horizon, ACTION_SIZE))
