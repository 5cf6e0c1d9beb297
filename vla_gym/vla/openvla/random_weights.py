"""OpenVLA policies of the published size with random weights: speed does not depend on them."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vla_gym.errors import ConfigError
from vla_gym.memory import check_memory
from vla_gym.vla import check_device
from vla_gym.vla.base import PROPRIO_SIZE
from vla_gym.vla.load_weights import MEMORY_ADVICE, default_dtype
from vla_gym.vla.openvla.autoregressive import OpenVLABackend
from vla_gym.vla.openvla.base import OpenVLABase, Parts
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.model import L1ActionHead, OpenVLAModel, proprio_projector
from vla_gym.vla.openvla.oft import OpenVLAOFTBackend
from vla_gym.vla.openvla.sequence import START, Prompts
from vla_gym.vla.spec_options import make_options

#: Backends that :func:`random_policy` makes.
KINDS: dict[str, Any] = {"openvla": OpenVLABackend, "openvla-oft": OpenVLAOFTBackend}


def random_policy(
    kind: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    compile: bool = False,
    config: OpenVLAConfig | None = None,
    **options: Any,
) -> OpenVLABase:
    """Make a policy that knows nothing, for measurements without a checkpoint.

    Args:
        kind: One of :data:`KINDS`.
        device: Torch device.
        dtype: None: bfloat16 on a GPU, float32 on a CPU.
        compile: As for the backend.
        config: Sizes; default: those of the published checkpoints (7.5 billion parameters).
        **options: Of the backend. ``openvla-oft`` has two views with proprioception and an L1 head
            unless ``num_views=1`` and ``head="token"`` say otherwise.

    Raises:
        ConfigError: If the kind or an option is unknown, or there is no such device.
        NotEnoughMemoryError: If the device has too little memory.
    """
    if kind not in KINDS:
        raise ConfigError(f"Random weights: expected {' or '.join(KINDS)}, got {kind!r:.80}.")
    check_device(device)
    chosen = make_options(KINDS[kind].Options, options)
    config = config or OpenVLAConfig()
    dtype = default_dtype(device, dtype)
    width, oft = config.text.hidden_size, kind == "openvla-oft"
    with torch.device("meta"):
        model = OpenVLAModel(config)
        head = L1ActionHead(width) if oft and chosen.head != "token" else None
        projector = proprio_projector(width) if oft and chosen.num_views != 1 else None
    modules: list[nn.Module] = [m for m in (model, head, projector) if m is not None]
    count = sum(p.numel() for module in modules for p in module.parameters())
    check_memory(count * dtype.itemsize, "A policy of random weights", MEMORY_ADVICE, device)
    generator = torch.Generator(device).manual_seed(0)
    for module in modules:
        _fill(module, device, dtype, generator)
    model.llama.rotary_emb = LlamaRotaryEmbedding(config.text).to(device)
    prompts = Prompts(_hash, config.text.vocab_size)
    parts = Parts(f"{kind}-random", model, prompts, _RANGES, head, projector)
    made: OpenVLABase = KINDS[kind](parts, chosen, compile)
    return made


def _fill(module: nn.Module, device: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Move a module from the meta device; vectors become 1, matrices keep the inputs' size."""
    # In the dtype itself from the beginning: 7B in float32 would take twice the memory.
    module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    for values in module.parameters():
        values.fill_(1.0)
        if values.ndim > 1:
            values.normal_(0.0, values[0].numel() ** -0.5, generator=generator)


def _hash(text: str) -> list[int]:
    """Return made-up ids, one for each word and sign; Llama's would be a few more."""
    pieces = re.findall(r"\w+|[^\w ]", text)
    return [START, *(100 + zlib.crc32(piece.encode()) % 30_000 for piece in pieces)]


_RANGES = {
    "action": {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]},
    "proprio": {"q01": [-1.0] * PROPRIO_SIZE, "q99": [1.0] * PROPRIO_SIZE},
}
