"""OpenVLA policies of the published size with random weights: speed does not depend on them."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vla_gym.errors import ConfigError
from vla_gym.vla.base import PROPRIO_SIZE
from vla_gym.vla.checkpoint_files import check_memory, default_dtype
from vla_gym.vla.openvla.autoregressive import OpenVLABackend
from vla_gym.vla.openvla.base import Loaded
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.heads import L1ActionHead, ProprioProjector
from vla_gym.vla.openvla.model import OpenVLAModel
from vla_gym.vla.openvla.oft import OpenVLAOFTBackend
from vla_gym.vla.openvla.sequence import START, Prompts
from vla_gym.vla.openvla.vision import VisionTower

#: Backends that :func:`random_policy` makes.
KINDS = ("openvla", "openvla-oft")


def random_policy(
    kind: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    config: OpenVLAConfig | None = None,
    num_views: int = 2,
    head: str = "l1",
    **options: Any,
) -> OpenVLABackend | OpenVLAOFTBackend:
    """Make a policy that knows nothing, for measurements without a checkpoint.

    Args:
        kind: One of :data:`KINDS`.
        device: Torch device.
        dtype: None: bfloat16 on a GPU, float32 on a CPU.
        config: Sizes; default: those of the published checkpoints (7.5 billion parameters).
        num_views: Of ``openvla-oft``; with 2 it reads proprioception, as the published ones do.
        head: Of ``openvla-oft``: ``"l1"`` or ``"token"``.
        **options: Of the backend's constructor.

    Raises:
        ConfigError: If the kind or an option is unknown.
        NotEnoughMemoryError: If the device has too little memory.
    """
    if kind not in KINDS:
        raise ConfigError(f"Random weights: expected {' or '.join(KINDS)}, got {kind!r}.")
    config = config or OpenVLAConfig()
    dtype = default_dtype(device, dtype)
    width = config.text.hidden_size
    oft = kind == "openvla-oft"
    with torch.device("meta"):
        model = OpenVLAModel(config)
        for tower in model.vision_backbone.children():
            assert isinstance(tower, VisionTower)
            tower.drop_unused()
        action_head = L1ActionHead(width) if oft and head == "l1" else None
        projector = ProprioProjector(PROPRIO_SIZE, width) if oft and num_views == 2 else None
    modules: list[nn.Module] = [m for m in (model, action_head, projector) if m is not None]
    count = sum(p.numel() for module in modules for p in module.parameters())
    check_memory(count * dtype.itemsize, device, "random weights")
    generator = torch.Generator(device).manual_seed(0)
    for module in modules:
        _fill(module, device, dtype, generator)
    model.llama.rotary_emb = LlamaRotaryEmbedding(config.text).to(device)
    prompts = Prompts(_hash, config.text.vocab_size)
    parts = Loaded(f"{kind}-random", model, prompts, _RANGES, action_head, projector)
    try:
        if not oft:
            return OpenVLABackend(parts, **options)
        return OpenVLAOFTBackend(parts, num_views=num_views, head=head, **options)
    except TypeError as error:
        raise ConfigError(f"Random weights of {kind!r} do not take this: {error}.") from error


def _fill(module: nn.Module, device: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Move a module from the meta device; vectors become 1, matrices keep the inputs' size."""
    # One by one, in the dtype itself: 7B in float32 would take twice the memory.
    for name, parameter in list(module.named_parameters()):
        values = torch.ones(parameter.shape, dtype=dtype, device=device)
        if values.ndim > 1:
            values.normal_(0.0, values[0].numel() ** -0.5, generator=generator)
        owner, _, last = name.rpartition(".")
        frozen = nn.Parameter(values, requires_grad=False)
        module.get_submodule(owner).register_parameter(last, frozen)
    module.eval()


def _hash(text: str) -> list[int]:
    """Return made-up ids, one for each word and sign; Llama's would be a few more."""
    pieces = re.findall(r"\w+|[^\w ]", text)
    return [START, *(100 + zlib.crc32(piece.encode()) % 30_000 for piece in pieces)]


_RANGES = {
    "action": {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]},
    "proprio": {"q01": [-1.0] * PROPRIO_SIZE, "q99": [1.0] * PROPRIO_SIZE},
}
