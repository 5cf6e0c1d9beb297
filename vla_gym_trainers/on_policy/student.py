"""The copy of a VLA of which a part is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vla_gym.errors import ConfigError
from vla_gym.vla.lora import LoraAdapters, LoraSettings
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.stateful import is_stateful
from vla_gym_trainers.on_policy.policy_settings import Trainable


def check_trainable(vla: Any, protocol: type[Any], by: str) -> None:
    """Check that a backend has a protocol of :mod:`vla_gym.vla.base`; ``by`` is for the message.

    Raises:
        ConfigError: If it lacks a part of the protocol, or is stateful.
    """
    check_stateless(vla, by)
    if isinstance(vla, protocol):
        return
    named = set(dir(protocol)).union(
        *(vars(base).get("__annotations__", ()) for base in protocol.__mro__)
    )
    lacking = sorted(name for name in named - set(dir(vla)) if not name.startswith("_"))
    raise ConfigError(
        f"The VLA {getattr(vla, 'name', vla)!r} cannot be trained {by}: its backend lacks "
        f"{', '.join(lacking) or 'parts'} of vla_gym.vla.base.{protocol.__name__}; see "
        "docs/vla.md for the policies that each backend can be trained as."
    )


def check_stateless(vla: Any, by: str) -> None:
    """Raise a ConfigError if a VLA has a state; ``by`` says how it would be trained."""
    if is_stateful(vla):
        raise ConfigError(
            f"The VLA {vla.name!r} has a state and cannot be trained {by}, which shows it single "
            "observations without one: train a policy on top of it with td3, or with "
            "--policy rl-token of ppo and grpo."
        )


def check_can_be_kept(vla: Any, what: Trainable) -> None:
    """Check that :func:`save_student` can write what is trained.

    Raises:
        ConfigError: If it can write adapters alone, and others are trained.
    """
    if what != "lora" and not isinstance(vla, MiniBackend):
        raise ConfigError(
            f"Of {vla.name!r} only adapters can be kept, not what {what} trains: take lora "
            "(--lora-train-whole of ppo and grpo names modules that are trained whole)."
        )


def check_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Raise a ConfigError if what is trained has 16 bits."""
    if any(p.dtype != torch.float32 for p in parameters):
        raise ConfigError(
            "Adam's steps would be rounded away in what is trained here in 16 bits: load the VLA "
            "with dtype=float32, or train adapters (lora) alone, which are float32."
        )


def trainable_copy(
    vla: Any,
    what: Trainable = "lora",
    *,
    lora: LoraSettings | None = None,
    heads: tuple[str, ...] = ("token_head",),
    fresh_heads: bool = False,
) -> tuple[Any, LoraAdapters | None]:
    """Copy a backend and make a part of it trainable; the original is not touched.

    Weights that stay frozen are shared with the original, so that with LoRA a large VLA, its
    teacher and its reference fit into memory once.

    Args:
        vla: A backend with its network in ``.model``.
        what: ``"lora"``, ``"heads"`` or ``"full"``.
        lora: Of the adapters.
        heads: Names of the modules that ``"heads"`` trains and ``fresh_heads`` renews.
        fresh_heads: Give the heads new random weights. With LoRA they are then trained whole.

    Returns:
        The copy, and its adapters with ``"lora"``.

    Raises:
        ConfigError: If there is no such module.
    """
    model: nn.Module = vla.model
    modules = dict(model.named_modules())
    if missing := [name for name in heads if name not in modules]:
        raise ConfigError(
            f"{type(model).__name__} has no heads {', '.join(missing)}; its modules are "
            f"{', '.join(name for name, _ in model.named_children())}, and those inside of them."
        )
    own: set[int] = set()
    for name in heads if what == "heads" or fresh_heads else ():
        own |= {id(p) for p in modules[name].parameters()}
    if what == "full":
        own |= {id(p) for p in model.parameters()}
    tensors = (*model.parameters(), *model.buffers())
    student = copy.deepcopy(vla, {id(t): t for t in tensors if id(t) not in own})
    if fresh_heads:
        for name in heads:
            renew(student.model.get_submodule(name))
    if what == "lora":
        lora = lora or LoraSettings()
        if fresh_heads:
            whole = tuple(dict.fromkeys((*lora.train_whole, *heads)))
            lora = replace(lora, train_whole=whole)
        return student, LoraAdapters.add(student, lora)
    for p in student.model.parameters():
        if id(p) not in {id(t) for t in tensors}:
            p.requires_grad_(True)
    return student, None


def save_student(vla: Any, adapters: LoraAdapters | None, folder: Path) -> None:
    """Write a trained copy: ``adapters/`` if there are any, and a plain checkpoint in ``vla/``.

    ``vla/`` has the adapters merged into it and loads as any VLA. The embedded VLA alone has one:
    of others, and of adapters in classes derived from it, the adapters say all.
    """
    if adapters is not None:
        adapters.save(folder / "adapters")
    model: Any = vla.model
    if not isinstance(vla, MiniBackend) or (type(vla) is not MiniBackend and adapters is not None):
        return
    if adapters is not None:
        # One copy, so that the copied adapters are those of the copied network.
        model, adapters = copy.deepcopy((model, adapters))
        adapters.merge()
    model.save_pretrained(folder / "vla", half=False)


def renew(module: nn.Module) -> None:
    """Give a module and all inside of it new random weights, as when it was made.

    Raises:
        ConfigError: If it has parameters of its own that it cannot renew.
    """
    for part in module.modules():
        reset: Any = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
        elif next(part.parameters(recurse=False), None) is not None:
            raise ConfigError(f"{type(part).__name__} cannot be given new weights.")


def checkpoint_layers(vla: Any) -> None:
    """Let a network compute the layers of its stacks again in the backward pass.

    A stack is an ``nn.ModuleList`` of two or more modules of one class without a stack inside. The
    memory of a stack's activations falls to that of its inputs, for about a third more time. Of
    flow backends, whose layers keep keys, whole denoising steps are computed again instead.

    Raises:
        ConfigError: If the network has no such stack.
    """
    stacks = [m for m in vla.model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    alike = [stack for stack in stacks if len({type(x) for x in stack}) == 1]
    inner = set(map(id, stacks))
    layers = [x for s in alike for x in s if not any(id(m) in inner for m in x.modules())]
    if not layers:
        raise ConfigError(
            f"{type(vla.model).__name__} has no stack of layers: leave out gradient_checkpointing."
        )
    vla.model.checkpointed = True
    layer: Any
    for layer in layers:
        # Not a closure: a copy of the network must compute with the copied layer.
        layer.forward = partial(_again, layer)
        layer.checkpointed = True  # for who runs the parts of a layer itself


def _again(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer)
    # A cache of keys would grow again in the second pass.
    cached = kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None
    if not torch.is_grad_enabled() or cached:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
