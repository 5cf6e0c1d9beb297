"""What trainers do with torch alike: threads for a while, learning rates, files of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from vla_gym.errors import WeightsError
from vla_gym.files import replacing


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads in here, and as many as before afterwards."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def fast_bf16(device_type: str) -> bool:
    """Return whether matrix products in bfloat16 are known to be fast on "cpu", "cuda" ...

    A processor without the instructions takes over ten times as long as in float32.
    """
    if device_type != "cpu":
        return device_type == "cuda"
    # Torch before 2.13 cannot tell; float32 is always right, only slower.
    ask = getattr(torch.cpu, "get_capabilities", None)
    capabilities: dict[str, Any] = {} if ask is None else ask()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def set_cosine_rate(
    optimizer: torch.optim.Optimizer,
    step: int,
    total: int,
    *,
    peak: float,
    warmup: int,
    floor: float = 0.02,
) -> float:
    """Set the learning rate of a step, and return it.

    A linear warm-up to ``peak`` over ``warmup`` steps, times a cosine over ``total`` steps that
    falls to ``floor``.
    """
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / total))
    rate = peak * min(1.0, (step + 1) / warmup) * (floor + (1.0 - floor) * cosine)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def save_parameters(
    path: Path, state: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a state dict as a safetensors file, which appears when it is whole.

    So a model that has mapped the old file keeps it.
    """
    content = save({name: value.contiguous() for name, value in state.items()}, metadata)
    with replacing(path) as draft:
        draft.write_bytes(content)


def load_parameters(path: Path) -> dict[str, Tensor]:
    """Read a file of :func:`save_parameters`.

    Raises:
        WeightsError: If the file is missing or damaged.
    """
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} is no whole file of parameters: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write state dicts and tensors."""
    # Into Python's file: of its own, torch loses why a write failed (a full disk).
    with open(path, "wb") as file:
        torch.save(dict(tensors), file)


def load_tensors(path: Path) -> dict[str, Any]:
    """Read a file of :func:`save_tensors` to the CPU; nothing in it is executed.

    Raises:
        WeightsError: If the file is missing or damaged.
    """
    try:
        tensors: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and OS errors alike
        raise WeightsError(f"{path} is no whole file of tensors: {error}") from error
    return tensors
