"""pi0.5 (arXiv 2504.16054) as a backend: pi0's VLM, another expert; lerobot's checkpoints.

Written from the paper and openpi's description of the format, checked against the outputs of openpi
and of lerobot 0.6.1. transformers has no such model. Three things differ from pi0: the state is
written into the prompt, as 256 bins, and is no token of the expert's; time reaches the expert
through the norms of its layers, which scale, shift and gate by it; all actions see each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PI0Config, PI0ForConditionalGeneration

from vla_gym.vla.base import PROPRIO_SIZE
from vla_gym.vla.flow.backend import FlowInputs, FlowOptions, Velocity
from vla_gym.vla.flow.functions import apply_rope, masked_attention, time_embedding
from vla_gym.vla.flow.pi0 import Pi0Backend


@dataclass(frozen=True)
class Pi05Options(FlowOptions):
    """Options of pi0.5.

    Attributes:
        state_in_prompt: How many numbers of the state the prompt tells: LIBERO's 8; 32 for a policy
            that was trained with lerobot before 0.5, which padded them; 0 for one that was trained
            with openpi's ``discrete_state_input=False``, as its own LIBERO policy. No file of a
            checkpoint tells which.
    """

    state_in_prompt: Literal[8, 32, 0] = 8


class AdaptiveNorm(nn.Module):
    """RMS norm that a condition scales and shifts; what comes after it, it gates."""

    def __init__(self, size: int, epsilon: float) -> None:
        """Make the norm of vectors of a size, which is the condition's too."""
        super().__init__()
        self.epsilon = epsilon
        self.dense = nn.Linear(size, 3 * size)

    def forward(
        self, x: torch.Tensor, condition: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised (B, N, size) and the gate (size,) of ``x``'s dtype."""
        modulation = self.dense(condition.to(self.dense.weight.dtype)).float()
        scale, shift, gate = modulation.chunk(3, dim=-1)
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.epsilon)
        return (normed * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)


class ActionTimeEmbedding(nn.Module):
    """What the expert starts from: noisy actions, and time as the condition of its norms."""

    def __init__(self, action_dim: int, size: int) -> None:
        """Make it with random weights; ``size`` is the expert's width."""
        super().__init__()
        self.action_in_proj = nn.Linear(action_dim, size)
        self.time_mlp_in = nn.Linear(size, size)
        self.time_mlp_out = nn.Linear(size, size)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings (B, C, size) of (B, C, A) and the condition (size,) of time (size,)."""
        condition = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))
        return self.action_in_proj(noisy), condition


class Pi05Network(PI0ForConditionalGeneration):
    """transformers' pi0 with pi0.5's expert; :meth:`denoise` takes the place of ``forward``."""

    def __init__(self, config: PI0Config) -> None:
        super().__init__(config)
        expert: Any = self.model.dit
        size, epsilon = expert.config.hidden_size, expert.config.rms_norm_eps
        for layer in expert.layers:
            layer.input_layernorm = AdaptiveNorm(size, epsilon)
            layer.post_attention_layernorm = AdaptiveNorm(size, epsilon)
        expert.norm = AdaptiveNorm(size, epsilon)
        del expert.rotary_emb  # the layers' parts are run by denoise
        embedding: Any = ActionTimeEmbedding(config.max_action_dim, size)
        self.embed_action_time = embedding

    def denoise(
        self,
        noisy: torch.Tensor,
        time: torch.Tensor,
        prefix: list[tuple[torch.Tensor, torch.Tensor]],
        mask: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return hidden states (B, C, H) float32.

        Args:
            noisy: (B, C, max_action_dim) float32.
            time: (H,) float32: :func:`~vla_gym.vla.flow.functions.time_embedding` of the step.
            prefix: The VLM's keys and values (B, heads, P, head_dim) of each layer.
            mask: (B, 1, 1, P + C) bool, False where the prefix is padding.
            positions: (B, C) int64, positions of the actions after the prefix.
        """
        x, condition = self.embed_action_time(noisy, time)
        x = x.to(prefix[0][0].dtype)
        expert: Any = self.model.dit
        for layer, (keys, values) in zip(expert.layers, prefix, strict=True):
            inner = layer.self_attn
            h, gate = layer.input_layernorm(x, condition)
            q, k, v = (
                projection(h).unflatten(-1, (-1, inner.head_dim)).transpose(1, 2)
                for projection in (inner.q_proj, inner.k_proj, inner.v_proj)
            )
            k = torch.cat([keys, apply_rope(k, positions)], dim=2)
            v = torch.cat([values, v], dim=2)
            attended = masked_attention(apply_rope(q, positions), k, v, mask)
            x = x + gate * inner.o_proj(attended)
            h, gate = layer.post_attention_layernorm(x, condition)
            x = x + gate * layer.mlp(h)
        hidden: torch.Tensor = expert.norm(x, condition)[0].float()
        return hidden


class Pi05Backend(Pi0Backend):
    """:class:`~vla_gym.vla.base.FrozenVLA` over :class:`Pi05Network`."""

    policy_type = "pi05"
    max_prompt = 200
    Options = Pi05Options
    options: Pi05Options
    network = Pi05Network

    def set_up(self, compile: bool) -> None:
        """See :meth:`FlowBackend.set_up`."""
        self._read_sizes()
        self._denoise = Pi05Network.denoise  # of any network: copies have their own
        if compile:
            self.model.model.vlm.vision_tower.compile(dynamic=False)
            self._denoise = torch.compile(Pi05Network.denoise, dynamic=False)

    def prompts(self, instructions: list[str], proprio: np.ndarray) -> list[str]:
        """See :meth:`FlowBackend.prompts`.

        Bins are those of openpi and lerobot: 256 of equal size between -1 and 1, which are the
        quantiles of the training data; below is -1, above 255.
        """
        tasks = [text.strip().replace("_", " ").replace("\n", " ") for text in instructions]
        count = self.options.state_in_prompt
        if not count:
            return [f"{task}\n" for task in tasks]
        # In float64 and rounded: the lower quantile itself is -1, not a little less.
        state = self.files.state.normalize(torch.from_numpy(proprio).double()).float()
        state = F.pad(state, (0, count - PROPRIO_SIZE))
        bins = ((state.double() + 1.0) * 128.0).floor().clamp(-1, 255).long()
        return [
            f"Task: {task}, State: {' '.join(map(str, row))};\nAction: "
            for task, row in zip(tasks, bins.tolist(), strict=True)
        ]

    def flow(self, inputs: FlowInputs) -> Velocity:
        """Run PaliGemma once, which reads the state in the prompt; see :meth:`FlowBackend.flow`."""
        model, config = self.model, self.model.config
        cache, mask = self._prefill(inputs)
        prefix = [(layer.keys, layer.values) for layer in cache.layers]
        steps = torch.arange(self.horizon, device=mask.device)
        positions = mask.sum(dim=1, keepdim=True) + steps
        visible = F.pad(mask.bool(), (0, self.horizon), value=True)[:, None, None, :]

        def velocity(x: torch.Tensor, time: float) -> tuple[torch.Tensor, torch.Tensor]:
            # pi0.5 counts time from the action (0) to noise (1).
            at = time_embedding(
                1.0 - time, self.hidden_size, config.min_period, config.max_period, x.device
            )
            hidden = self._denoise(self.model, x, at, prefix, visible, positions)
            return hidden, -model.action_out_proj(hidden)

        return velocity
