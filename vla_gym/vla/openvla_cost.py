"""Operations and bytes of OpenVLA and OpenVLA-OFT, counted from the configuration."""

from __future__ import annotations

from vla_gym.vla.cost import Cost
from vla_gym.vla.openvla_config import OpenVLAConfig
from vla_gym.vla.openvla_heads import ACTION_SIZE, PROPRIO_SIZE
from vla_gym.vla.openvla_model import NUM_ACTION_IDS
from vla_gym.vla.timm_vit import ViTConfig


def linear(rows: float, inputs: int, outputs: int) -> float:
    """Return the operations of a matrix product."""
    return 2.0 * rows * inputs * outputs


def attention(queries: int, keys: int, width: int) -> float:
    """Return the operations of scores and weighted sums, without a causal mask's saving."""
    return 4.0 * queries * keys * width


def tower_cost(tower: ViTConfig) -> tuple[float, int]:
    """Return a vision tower's operations for one image, and the parameters that it reads."""
    width, blocks = tower.width, tower.depth - 1  # the last block is never run
    tokens = tower.num_patches + tower.registers + tower.cls_token
    pixels = 3 * tower.patch_size**2
    weights = 4 * width**2 + 2 * width * tower.mlp_width
    flops = blocks * (linear(tokens, weights, 1) + attention(tokens, tokens, width))
    vectors = 9 * width + tower.mlp_width + 2 * width * tower.layer_scale
    extra = (tower.num_patches + tower.registers + tower.cls_token + 1) * width
    return (
        flops + linear(tower.num_patches, pixels, width),
        blocks * (weights + vectors) + pixels * width + extra,
    )


def vision_cost(config: OpenVLAConfig, views: int) -> tuple[dict[str, float], int]:
    """Return the operations of towers and projector by part, and the parameters read."""
    parts = [tower_cost(tower) for tower in config.towers]
    width, hidden = sum(tower.width for tower in config.towers), config.text.hidden_size
    projector = 4 * width**2 + 4 * width * hidden + hidden**2
    flops = {
        "vision towers": views * sum(flops for flops, _ in parts),
        "projector": linear(views * config.num_patches, projector, 1),
    }
    return flops, sum(size for _, size in parts) + projector + 4 * width + 2 * hidden


def llama_weights(config: OpenVLAConfig) -> tuple[int, int]:
    """Return the weights of a layer: those of keys and values, and the others."""
    text = config.text
    head_size = text.hidden_size // text.num_attention_heads
    heads = text.num_key_value_heads or text.num_attention_heads
    keys_values = 2 * text.hidden_size * heads * head_size
    return keys_values, 2 * text.hidden_size**2 + 3 * text.hidden_size * text.intermediate_size


def llama_flops(config: OpenVLAConfig, new: int, keys: int, read: int) -> float:
    """Return the Llama's operations.

    Args:
        config: Sizes.
        new: Tokens that go in.
        keys: Tokens that they attend to, themselves included.
        read: Rows of the last layer that anybody reads; the others' queries and MLP are skipped.
    """
    text, (keys_values, others) = config.text, llama_weights(config)
    layers = text.num_hidden_layers

    def layer(queries: int) -> float:
        size = linear(new, keys_values, 1) + linear(queries, others, 1)
        return size + attention(queries, keys, text.hidden_size)

    return (layers - 1) * layer(new) + layer(read)


def llama_size(config: OpenVLAConfig) -> int:
    """Return the parameters that a pass through the Llama's layers reads."""
    text = config.text
    return text.num_hidden_layers * (sum(llama_weights(config)) + 2 * text.hidden_size)


def parallel_cost(
    config: OpenVLAConfig,
    *,
    views: int,
    prompt: int,
    horizon: int,
    stop: bool,
    proprio: bool,
    l1: bool,
    itemsize: int,
) -> Cost:
    """Return the cost of an OpenVLA-OFT chunk.

    Args:
        config: Sizes.
        views: Cameras.
        prompt: Tokens from ``<s>`` to 29871, padding included.
        horizon: Actions in a chunk.
        stop: Whether ``</s>`` ends the sequence.
        proprio: Whether there is a token of proprioception.
        l1: The regression head; else the token head.
        itemsize: Bytes of a weight.
    """
    hidden, queries = config.text.hidden_size, horizon * ACTION_SIZE
    tokens = views * config.num_patches + proprio + prompt + queries + stop
    flops, size = vision_cost(config, views)
    flops["language model"] = llama_flops(config, tokens, tokens, queries)
    size += llama_size(config)
    projector = (PROPRIO_SIZE * hidden + hidden**2) * proprio
    flops["heads"] = linear(1, projector, 1)
    if l1:
        head = ACTION_SIZE * hidden**2 + 2 * hidden**2 + ACTION_SIZE * hidden
        flops["heads"] += linear(horizon, head, 1)
    else:
        head = NUM_ACTION_IDS * hidden
        flops["heads"] += linear(queries, head, 1)
    return Cost(flops, float(itemsize * (size + projector + head)))


def autoregressive_cost(config: OpenVLAConfig, prompt: int, itemsize: int) -> Cost:
    """Return the cost of an OpenVLA action: one pass over all, six more over one token each."""
    hidden = config.text.hidden_size
    tokens, steps = config.num_patches + prompt, ACTION_SIZE - 1
    flops, size = vision_cost(config, 1)
    flops["language model"] = llama_flops(config, tokens, tokens, 1) + sum(
        llama_flops(config, 1, tokens + 1 + step, 1) for step in range(steps)
    )
    head = NUM_ACTION_IDS * hidden
    flops["heads"] = linear(ACTION_SIZE, head, 1)
    size += ACTION_SIZE * (llama_size(config) + head)
    return Cost(flops, float(itemsize * size))
