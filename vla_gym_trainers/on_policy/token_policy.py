"""The VLA's own action tokens as a policy, and the copy of the VLA of which a part is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_gym.errors import ConfigError
from vla_gym.vla.base import ACTION_SIZE, CAMERAS, PROPRIO_SIZE, TokenVLA, TrainableTokenVLA
from vla_gym.vla.lora import LoraAdapters, LoraSettings
from vla_gym.vla.preprocess import area_downsample
from vla_gym_trainers.on_policy.config import Trainable
from vla_gym_trainers.on_policy.distributions import TokenDistribution
from vla_gym_trainers.on_policy.policy import Observation, Policy, ValueHead
from vla_gym_trainers.on_policy.rollout import ArraySpec


class TokenPolicy(Policy):
    """A policy over the tokens of a VLA; a sample is a chunk's tokens, (C, 7).

    Attributes:
        vla: The backend; what of its ``model`` has gradients is trained.
        temperature: Of drawing and of log-probabilities.
        stored_size: Side in pixels at which frames are kept.
    """

    def __init__(
        self,
        vla: TokenVLA,
        *,
        temperature: float = 1.0,
        value_head: ValueHead | None = None,
    ) -> None:
        """Make a policy.

        Args:
            vla: A backend with a token head.
            temperature: Positive.
            value_head: Reads the hidden state of the first action query; None for GRPO. Its loss
                does not move the VLA.

        Raises:
            ConfigError: If the VLA has no token head, or the temperature is not positive.
        """
        if not isinstance(vla, TrainableTokenVLA):
            raise ConfigError(
                f"The VLA {getattr(vla, 'name', vla)!r} cannot be trained on its tokens: its "
                "backend needs model, act_tokens, token_log_probs, token_outputs and "
                "actions_to_tokens (see vla_gym.vla.base.TrainableTokenVLA)."
            )
        if not temperature > 0.0:
            raise ConfigError(f"The temperature must be positive, got {temperature}.")
        self.vla: TrainableTokenVLA = vla
        self.value_head, self.temperature = value_head, temperature
        self.stored_size = int(getattr(vla, "input_size", vla.image_size))
        self.cameras: tuple[str, ...] = tuple(getattr(vla, "cameras", CAMERAS))
        proprio_size = getattr(vla, "proprio_size", PROPRIO_SIZE)
        frame: ArraySpec = ((self.stored_size, self.stored_size, 3), torch.uint8)
        self.observation = {camera: frame for camera in self.cameras}
        self.observation["proprio"] = (proprio_size,), torch.float32
        self.observation["task_id"] = (), torch.int64
        self.factors = (vla.horizon, getattr(vla, "action_size", ACTION_SIZE))
        self.sample = self.factors, torch.uint8
        self.value_size, self.image_size = vla.hidden_size, vla.image_size

    def observe(self, observation: Mapping[str, np.ndarray], texts: Sequence[str]) -> Observation:  # noqa: ARG002
        """Return the camera images at the size at which the VLA sees them, proprio and task."""
        frames = {camera: observation[camera] for camera in self.cameras}
        if self.stored_size != self.vla.image_size:
            frames = {k: area_downsample(v, self.stored_size) for k, v in frames.items()}
        return {
            **frames,
            "proprio": np.array(observation["proprio"], np.float32),
            "task_id": np.array(observation["task_id"], np.int64),
        }

    def distribution(
        self, observation: Observation, instructions: Sequence[str]
    ) -> tuple[TokenDistribution, Tensor | None]:
        """Run the VLA."""
        frames = {camera: observation[camera] for camera in self.cameras}
        hidden, logits = self.vla.token_outputs(frames, list(instructions), observation["proprio"])
        value_input = None if self.value_head is None else hidden[:, 0].detach().float()
        return TokenDistribution(logits, self.temperature), value_input

    def actions(self, sample: Tensor, observation: Observation) -> Tensor:  # noqa: ARG002
        """Return the actions of tokens."""
        return self.vla.tokens_to_actions(sample)

    def factor_mask(self, executed: Tensor) -> Tensor:
        """Tokens of control steps that were never executed took no part."""
        steps = torch.arange(self.vla.horizon) < executed[:, None]
        return steps[..., None].expand(len(executed), *self.factors)

    def networks(self) -> dict[str, nn.Module]:
        """Return the VLA's network."""
        return {"vla": self.vla.model}


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
        ConfigError: If there is no such module, or ``what`` is something else.
    """
    if what not in ("lora", "heads", "full"):
        raise ConfigError(f"Expected 'lora', 'heads' or 'full' to be trained, got {what!r}.")
    model: nn.Module = vla.model
    modules = dict(model.named_modules())
    if missing := [name for name in heads if name not in modules]:
        raise ConfigError(f"{type(model).__name__} has no heads {', '.join(missing)}.")
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
            lora = LoraSettings(**{**lora.__dict__, "train_whole": whole})
        return student, LoraAdapters.add(student, lora)
    for p in student.model.parameters():
        if id(p) not in {id(t) for t in tensors}:
            p.requires_grad_(True)
    return student, None


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
