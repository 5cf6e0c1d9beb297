"""Frozen VLA backends: the protocol, and :func:`load`.

Importing this package imports neither torch nor transformers; loading a model does.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.errors import ConfigError
from vla_gym.outside import to_type
from vla_gym.vla.base import FrozenVLA, TokenVLA, VLAOutput
from vla_gym.vla.files import last_written
from vla_gym.vla.registry import Spec, backend_class, known_backends, parse_spec
from vla_gym.vla.stateful import StatefulVLA

if TYPE_CHECKING:
    import torch

__all__ = ["FrozenVLA", "StatefulVLA", "TokenVLA", "VLAOutput", "known_backends", "load"]


def load(
    spec: str | Path,
    device: str = "cpu",
    dtype: torch.dtype | str | None = None,
    compile: bool = False,
    *,
    allow_class: bool = True,
    **options: Any,
) -> FrozenVLA:
    """Return a frozen VLA; the same one for every call with the same arguments and files.

    Args:
        spec: ``"mini"``, ``"<backend>:/path"``, a folder whose config.json tells its backend, or
            ``"class:package.module:Class:/path"``; options may follow, as in
            ``"openvla-oft:/path?unnorm_key=libero_goal"``; see :mod:`vla_gym.vla.registry`.
        device: Torch device, e.g. ``"cpu"`` or ``"cuda:0"``.
        dtype: Of the weights, e.g. ``"bfloat16"``; None for what suits the backend and the device.
        compile: Whether to compile the network with ``torch.compile``.
        allow_class: False where ``spec`` was read from a file: no class is imported by its path.
        **options: The backend's own, e.g. ``unnorm_key="libero_goal_no_noops"``; they go before
            those of the specification. For all backends, ``adapters``: a folder of LoRA adapters
            (``vla_gym.vla.lora``), which are merged into the weights.

    Raises:
        ConfigError: If the backend or an option is unknown, or there is no such device.
        WeightsError: If the checkpoint is missing, corrupt or of an unknown architecture, or the
            adapters do not fit it.
        NotEnoughMemoryError: If the weights do not fit into the device.
    """
    parsed = parse_spec(spec, allow_class=allow_class)
    check_device(str(device))
    options = {**dict(parsed.options), **options}
    in_spec = {name: options.pop(name) for name in ("dtype", "compile") if name in options}
    switch: Any = bool | None
    read = [parsed.path]
    if options.get("adapters") is not None:
        read.append(Path(str(options["adapters"])).expanduser().absolute())
        options["adapters"] = str(read[-1])
    arguments = (
        parsed._replace(options=()),
        str(device),
        parse_dtype(in_spec.get("dtype") if dtype is None else dtype),
        bool(compile or to_type(in_spec.get("compile"), switch, "The option compile")),
        tuple(sorted(options.items())),
        tuple(map(last_written, read)),
    )
    try:
        hash(arguments)
    except TypeError:  # an option such as a list: nothing to find the model by again
        return _load.__wrapped__(*arguments)
    return _load(*arguments)


def as_vla(
    vla: str | Path | FrozenVLA, device: str = "cpu", *, allow_class: bool = True
) -> FrozenVLA:
    """Return a VLA that is given as :func:`load` takes it, or as itself.

    Raises:
        ConfigError: If it is neither; further errors are those of :func:`load`.
    """
    if isinstance(vla, str | Path):
        return load(vla, device=device, allow_class=allow_class)
    if not isinstance(vla, FrozenVLA):
        raise ConfigError(
            "vla must be a name, a folder, or an object of a class derived from "
            f"vla_gym.vla.FrozenVLA; got {vla!r:.80}."
        )
    return vla


@cache
def _load(
    spec: Spec,
    device: str,
    dtype: torch.dtype | None,
    compile: bool,
    options: tuple[tuple[str, Any], ...],
    written: object,  # noqa: ARG001 - of the same folder with other files it is another VLA
) -> FrozenVLA:
    chosen = backend_class(spec.backend)
    own = dict(options)
    adapters = own.pop("adapters", None)
    arguments = {"device": device, "dtype": dtype, "compile": compile, **own}
    signature = inspect.signature(chosen.from_pretrained)
    try:
        signature.bind(spec.path, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"The VLA backend {spec.backend!r} does not take these options: {error}. It takes: "
            f"{', '.join(list(signature.parameters)[1:])}."
        ) from error
    vla: FrozenVLA = chosen.from_pretrained(spec.path, **arguments)
    for name in ("cameras", "action_size", "proprio_size", "input_size", "heads", "head"):
        if not hasattr(vla, name):  # of a class that does not derive from FrozenVLA
            setattr(vla, name, getattr(FrozenVLA, name))
    if lacking := [n for n in (*FrozenVLA.__annotations__, "infer") if not hasattr(vla, n)]:
        raise ConfigError(
            f"The VLA backend {spec.backend!r} lacks {', '.join(lacking)} of "
            "vla_gym.vla.FrozenVLA; see docs/extending.md."
        )
    if adapters is not None:
        from vla_gym.vla.lora import LoraAdapters

        LoraAdapters.load(vla, adapters).merge()
    return vla


def check_device(device: str) -> None:
    """Check that torch has a device.

    Raises:
        ConfigError: If it has not.
    """
    import torch

    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The torch device {device!r} is not there ({why}): give one that torch "
            f"{torch.__version__} can use here, such as 'cpu'."
        ) from error


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a float dtype of that name; None stays None.

    Raises:
        ConfigError: If there is none of that name.
    """
    if dtype is None:
        return None
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"Expected a dtype such as 'float32' or 'bfloat16', got {dtype!r:.80}.")
    return found
