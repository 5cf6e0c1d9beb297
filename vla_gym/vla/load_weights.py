"""Loading a checkpoint's weights into a module: names, shapes, dtypes, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_gym.errors import WeightsError
from vla_gym.memory import check_memory
from vla_gym.vla.checkpoint_files import Checkpoint

#: What to do if weights do not fit into a device.
MEMORY_ADVICE = "use dtype='bfloat16' if you did not, free memory, or take a larger device"


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str | None] | None = None,
    keep_float32: Sequence[str] = (),
) -> None:
    """Replace all parameters and buffers of a module by a checkpoint's, one tensor at a time.

    The module is best made on the meta device: then no memory is used twice, and nothing is
    initialised in vain. Buffers that no checkpoint has (rotary frequencies) must be made by the
    caller. A parameter that is tied to another is found under either name. All are frozen.

    Args:
        module: Takes the weights.
        checkpoint: Gives them.
        device: Where the weights go.
        dtype: What float weights become; None: bfloat16 on a GPU, float32 elsewhere.
        rename: From a checkpoint's name to the module's; None for what is not needed.
        keep_float32: Beginnings of the module's names that become float32 whatever ``dtype`` is.

    Raises:
        WeightsError: With all names that are missing, left over or of another shape.
        NotEnoughMemoryError: With the memory that is needed and the memory that is free.
    """
    targets = module.state_dict(keep_vars=True)
    sources: dict[str, str] = {}
    unexpected = []
    for name in checkpoint.shapes:
        new = rename(name) if rename else name
        if new in targets:
            sources[new] = name
        elif new is not None:
            unexpected.append(name)
    given = {id(targets[name]) for name in sources}
    missing = [name for name, tensor in targets.items() if id(tensor) not in given]
    wrong = [
        f"{name} {checkpoint.shapes[old]} instead of {tuple(targets[name].shape)}"
        for name, old in sources.items()
        if checkpoint.shapes[old] != tuple(targets[name].shape)
    ]
    if missing or unexpected or wrong:
        raise WeightsError(
            f"Checkpoint {checkpoint.path} does not fit {type(module).__name__}"
            + _listed("missing", missing)
            + _listed("unexpected", unexpected)
            + _listed("of another shape", wrong)
            + ". Is it for another backend, or were other options used to train it?"
        )

    chosen = default_dtype(device, dtype)

    def wanted(name: str) -> torch.dtype:
        return torch.float32 if name.startswith(tuple(keep_float32)) else chosen

    size = sum(targets[name].numel() * wanted(name).itemsize for name in sources)
    check_memory(size, f"Loading {checkpoint.path}", MEMORY_ADVICE, device)
    replaced: dict[int, torch.Tensor] = {}
    for name, old in sources.items():
        tensor = checkpoint.tensor(old)
        if tensor.is_floating_point() != targets[name].is_floating_point():
            raise WeightsError(
                f"Checkpoint {checkpoint.path} has {old} as {tensor.dtype}: expected "
                f"{targets[name].dtype}. Quantised weights are not read."
            )
        if tensor.is_floating_point():
            tensor = tensor.to(device, wanted(name))
            if not tensor.isfinite().all():
                raise WeightsError(
                    f"Checkpoint {checkpoint.path} holds values that are not finite in {old}: "
                    "copy or download it again."
                )
        replaced[id(targets[name])] = tensor.to(device)
    weights = {name: replaced[id(target)] for name, target in targets.items()}
    module.requires_grad_(False).load_state_dict(weights, assign=True)


@contextmanager
def described_by(folder: Path) -> Iterator[None]:
    """Make a network as a folder's configuration tells.

    Raises:
        WeightsError: In place of whatever else is raised: which values fit together in each of
            transformers' networks, no reader knows.
    """
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:
        raise WeightsError(
            f"The configuration in {folder} describes no network that can be made: {error!r}."
        ) from error


def fill_buffers(network: Any) -> None:
    """Give a network of transformers' on the meta device its buffers, on the CPU.

    They are what no checkpoint has, rotary frequencies.
    """
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
    network.initialize_weights()  # fills the buffers, not parameters without storage


def default_dtype(device: str | torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that was asked for, else bfloat16 on a GPU and float32 elsewhere."""
    if dtype is not None:
        return dtype
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def _listed(what: str, names: Iterable[str], limit: int = 20) -> str:
    names = sorted(names)
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"; {len(names)} {what}: {', '.join(names[:limit])}{more}"
