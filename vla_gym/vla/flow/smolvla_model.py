"""The network of SmolVLA: transformers' SmolVLM and a narrower action expert beside its layers.

Written from arXiv 2506.01844, checked against lerobot 0.6.1's outputs. The attention is our own,
because every piece differs from Llama's: RoPE's base is 10000 whatever the configuration says, the
prefix is bidirectional except for the state token, and every other layer of the expert attends to
the VLM's cached keys and values alone. Modules are named so that published checkpoints' keys fit.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaModel, SmolVLMModel

from vla_gym.vla.flow.backend import FlowInputs
from vla_gym.vla.flow.functions import apply_rope, masked_attention
from vla_gym.vla.flow.lerobot_files import PolicyConfig


class Prefix(NamedTuple):
    """What all denoising steps share.

    Attributes:
        keys: Of every layer of the expert, (B, heads, P, head_dim): the VLM's where the layer sees
            the actions too, projected by the expert where it does not.
        values: Likewise.
        mask: (B, 1, 1, P) bool, False where the prefix is padding.
        positions: (B, C) int64, positions of the actions after the prefix.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    mask: torch.Tensor
    positions: torch.Tensor


def _expert_config(text: Any, width: float, num_layers: int) -> Any:
    config = copy.deepcopy(text)
    config.hidden_size = int(text.hidden_size * width)
    # The MLP's width: 8/3 of the model's, rounded up to a multiple of 256.
    wanted = 4 * int(2 * config.hidden_size / 3)
    config.intermediate_size = 256 * math.ceil(wanted / 256)
    config.num_hidden_layers = num_layers
    config.vocab_size = 1  # its embedding table is dropped
    config.pad_token_id = None
    return config


class _VLMWithExpert(nn.Module):
    """VLM and expert.

    Attributes:
        sees_actions: Of each layer of the expert: it attends to the actions too.
    """

    def __init__(self, policy: PolicyConfig, config: Any) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        text = config.text_config
        if policy.num_vlm_layers > 0:
            text.num_hidden_layers = min(policy.num_vlm_layers, text.num_hidden_layers)
        # Named as in the checkpoints; its lm_head is never used.
        vlm: Any = SmolVLMModel(config)
        self.vlm = nn.ModuleDict({"model": vlm})
        expert = _expert_config(text, policy.expert_width_multiplier, text.num_hidden_layers)
        self.lm_expert = LlamaModel(expert)
        # No words, and the rotation is our own, see the module.
        del self.lm_expert.embed_tokens, self.lm_expert.rotary_emb
        del vlm.text_model.rotary_emb
        width = text.num_key_value_heads * text.head_dim
        every = policy.self_attn_every_n_layers
        layers = self.lm_expert.layers
        self.sees_actions = [every > 0 and i % every == 0 for i in range(len(layers))]
        for layer, sees_actions in zip(layers, self.sees_actions, strict=True):
            if not sees_actions:
                for name in ("k_proj", "v_proj"):
                    setattr(layer.self_attn, name, nn.Linear(width, width, expert.attention_bias))


class SmolVLANetwork(nn.Module):
    """From pixels, prompt, state and noise to the expert's hidden states and velocities."""

    def __init__(self, policy: PolicyConfig, vlm_config: Any) -> None:
        """Make the network with random weights.

        Args:
            policy: The checkpoint's.
            vlm_config: SmolVLMConfig of the VLM that the checkpoint was made from.
        """
        super().__init__()
        self.chunk_size = policy.chunk_size
        self.vlm_with_expert = _VLMWithExpert(policy, vlm_config)
        width = self.expert.config.hidden_size
        self.state_proj = nn.Linear(policy.max_state_dim, self.vlm.config.text_config.hidden_size)
        self.action_in_proj = nn.Linear(policy.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, policy.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def vlm(self) -> Any:
        """The vision-language model, a SmolVLMModel."""
        return self.vlm_with_expert.vlm.model

    @property
    def expert(self) -> Any:
        """The action expert, the layers of a LlamaModel."""
        return self.vlm_with_expert.lm_expert

    def _embed_prefix(self, inputs: FlowInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings (B, P, width) and mask (B, P) of images, prompt and state."""
        dtype = self.vlm.text_model.embed_tokens.weight.dtype
        pixels, tokens, token_mask, state = inputs
        states = self.vlm.vision_model(pixels.flatten(0, 1).to(dtype)).last_hidden_state
        images = self.vlm.connector(states).unflatten(0, pixels.shape[:2]).flatten(1, 2)
        scale = math.sqrt(images.shape[-1])
        text = self.vlm.text_model.embed_tokens(tokens)
        row = self.state_proj(state.to(self.state_proj.weight.dtype))[:, None].to(dtype)
        ones = token_mask.new_ones
        mask = torch.cat([ones(images.shape[:2]), token_mask, ones(row.shape[:2])], dim=1)
        return torch.cat([images * scale, text * scale, row], dim=1), mask

    def prefill(self, inputs: FlowInputs) -> Prefix:
        """Run the VLM once and keep what the expert needs."""
        x, mask = self._embed_prefix(inputs)
        ends = mask.cumsum(dim=1)
        positions = ends - 1
        # Queries that are padding are not masked: nobody reads them, and a row without any key
        # would become NaN. The state, which is last, is seen by itself alone.
        count = mask.shape[1]
        visible = torch.ones(count, count, dtype=torch.bool, device=mask.device)
        visible[:-1, -1] = False
        attend = mask[:, None, None, :] & visible
        layers = self.vlm.text_model.layers
        keys, values = [], []
        for i, layer in enumerate(layers):
            last = i == len(layers) - 1
            q, k, v = self._project(layer, layer.input_layernorm(x), with_queries=not last)
            k = apply_rope(k, positions)
            if self.vlm_with_expert.sees_actions[i]:
                keys.append(k)
                values.append(v)
            else:  # the same for all denoising steps, so it is done once
                inner = self.expert.layers[i].self_attn
                keys.append(self._heads(inner.k_proj(k.transpose(1, 2).flatten(2))))
                values.append(self._heads(inner.v_proj(v.transpose(1, 2).flatten(2))))
            if q is not None:  # after the last layer only its keys and values are needed
                x = self._finish(layer, x, masked_attention(apply_rope(q, positions), k, v, attend))
        steps = torch.arange(self.chunk_size, device=mask.device)
        return Prefix(keys, values, mask[:, None, None, :], ends[:, -1:] + steps)

    def denoise(
        self, prefix: Prefix, noisy: torch.Tensor, time: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states (B, C, H) and velocities (B, C, max_action_dim), both float32.

        Args:
            prefix: From :meth:`prefill`.
            noisy: (B, C, max_action_dim) float32.
            time: (H,) float32: :func:`~vla_gym.vla.flow.functions.time_embedding` of the step.
        """
        actions = self.action_in_proj(noisy.to(self.action_in_proj.weight.dtype))
        x = torch.cat([actions, time.to(actions.dtype).expand_as(actions)], dim=-1)
        x = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(x)))
        x = x.to(prefix.keys[0].dtype)
        count = x.shape[1]
        causal = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        cross = prefix.mask.expand(-1, 1, count, -1)
        own = torch.cat([cross, causal.expand(len(x), 1, -1, -1)], dim=-1)
        restarted = torch.arange(count, device=x.device).expand(len(x), -1)
        for i, layer in enumerate(self.expert.layers):
            h = layer.input_layernorm(x)
            k, v = prefix.keys[i], prefix.values[i]
            if self.vlm_with_expert.sees_actions[i]:
                q, own_k, own_v = self._project(layer, h)
                k = torch.cat([k, apply_rope(own_k, prefix.positions)], dim=2)
                v = torch.cat([v, own_v], dim=2)
                attended = masked_attention(apply_rope(q, prefix.positions), k, v, own)
            else:
                q = self._heads(layer.self_attn.q_proj(h))
                attended = masked_attention(apply_rope(q, restarted), k, v, cross)
            x = self._finish(layer, x, attended)
        hidden = self.expert.norm(x).float()
        return hidden, self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype)).float()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        head_dim = self.vlm.config.text_config.head_dim
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    def _project(self, layer: Any, x: torch.Tensor, with_queries: bool = True) -> Any:
        attention = layer.self_attn
        q = self._heads(attention.q_proj(x)) if with_queries else None
        return q, self._heads(attention.k_proj(x)), self._heads(attention.v_proj(x))

    @staticmethod
    def _finish(layer: Any, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + layer.self_attn.o_proj(attended)
        return x + layer.mlp(layer.post_attention_layernorm(x))
