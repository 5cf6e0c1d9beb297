"""transformers' Llama layers, run one by one: any mask, and only the rows that are needed.

The weights, norms, MLPs and rotary embeddings are transformers'; the loop over the layers is
written out for three things that ``LlamaModel.forward`` does not do: attend in both directions,
leave out the last layer's queries and MLP for rows that nobody reads, and keep keys and values
without a mask that depends on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half


def run_layers(
    llama: Any,
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    *,
    rows: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    seen: DynamicCache | None = None,
) -> torch.Tensor:
    """Return the final, normalised states of some rows.

    Args:
        llama: transformers' LlamaModel.
        embeddings: (B, N, H).
        positions: (B or 1, N) int64.
        rows: (B, R) int64, positions in the sequence of the states that are returned.
        mask: (B, 1, 1, all keys) bool, True where a key may be attended to; None for everywhere,
            which lets the fastest kernels run.
        causal: Each token sees itself and those before it; excludes ``mask``.
        seen: Keys and values of earlier tokens, to which the new ones are added.

    Returns:
        (B, R, H) in the dtype of the embeddings.
    """
    x = embeddings
    cos, sin = llama.rotary_emb(x, position_ids=positions)
    rope = (cos[:, None], sin[:, None])
    for index, layer in enumerate(llama.layers):
        last = index == len(llama.layers) - 1
        arguments = (layer, index, x, rope, mask, causal, seen, rows if last else None)
        if getattr(layer, "checkpointed", False) and torch.is_grad_enabled() and seen is None:
            x = checkpoint(_run_layer, *arguments, use_reentrant=False)
        else:
            x = _run_layer(*arguments)
    result: torch.Tensor = llama.norm(x)
    return result


def _run_layer(
    layer: Any,
    index: int,
    x: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    causal: bool,
    seen: DynamicCache | None,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    cos, sin = rope
    q_input, q_cos, q_sin = normed, cos, sin
    if rows is not None:
        x, q_input = _pick(x, rows), _pick(normed, rows)
        q_cos, q_sin = (
            _pick(table[:, 0].expand(len(rows), -1, -1), rows)[:, None] for table in rope
        )
        if causal:
            keys = torch.arange(normed.shape[1], device=normed.device)
            mask, causal = (keys <= rows[..., None])[:, None], False
    size = attention.head_dim
    q, k, v = (
        projected.unflatten(-1, (-1, size)).transpose(1, 2)
        for projected in (
            attention.q_proj(q_input),
            attention.k_proj(normed),
            attention.v_proj(normed),
        )
    )
    q = q * q_cos + rotate_half(q) * q_sin
    k = k * cos + rotate_half(k) * sin
    if seen is not None:
        k, v = seen.update(k, v, index)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
    result: torch.Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return result


def _pick(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows (B, R) of x (B, N, D) as (B, R, D)."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
