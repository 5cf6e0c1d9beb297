"""The VLA as a stochastic policy over action tokens, with an optional value head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vla_gym.errors import ConfigError
from vla_gym.vla.base import TokenVLA, TrainableTokenVLA
from vla_gym.vla.preprocess import CAMERAS, area_downsample
from vla_gym_trainers.on_policy.losses import entropy_of
from vla_gym_trainers.on_policy.sampling import draw_tokens, keyed_uniform

Frames = dict[str, np.ndarray]


class Act(NamedTuple):
    """What a policy does with B observations; no gradients.

    Attributes:
        tokens: (B, C, 7) int64.
        log_probs: (B, C, 7) float32 of the tokens, at the policy's temperature.
        values: (B,) float32; zeros without a value head.
        actions: (B, C, 7) float32 in [-1, 1], what the environment executes.
        teacher_tokens: (B, C, 7) int64 of a teacher, or None.
        by_teacher: (B,) bool: these chunks are the teacher's.
        query: (B, H) float32 that the values were read off; None without a value head.
    """

    tokens: Tensor
    log_probs: Tensor
    values: Tensor
    actions: Tensor
    teacher_tokens: Tensor | None
    by_teacher: Tensor
    query: Tensor | None


class Evaluation(NamedTuple):
    """Tokens seen by the present parameters, with gradients.

    Attributes:
        log_probs: (B, C, 7), at the policy's temperature.
        entropy: (B, C, 7) at that temperature.
        values: (B,); zeros without a value head.
        teacher_log_probs: (B, C, 7) of the teacher's tokens at temperature 1, or None.
        greedy: (B, C, 7) int64: the most likely tokens.
        query: (B, H) float32 that the values were read off; None without a value head.
    """

    log_probs: Tensor
    entropy: Tensor
    values: Tensor
    teacher_log_probs: Tensor | None
    greedy: Tensor
    query: Tensor | None


class ValueHead(nn.Module):
    """Value of a state, read off the hidden state of the first action query; 0 when fresh."""

    def __init__(self, hidden_size: int, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.fc1, self.fc2 = nn.Linear(hidden_size, width), nn.Linear(width, 1)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, query: Tensor) -> Tensor:
        """Map states (B, H) to values (B,)."""
        hidden = nn.functional.gelu(self.fc1(self.norm(query.float())))
        return self.fc2(hidden).squeeze(-1)


class TokenPolicy:
    """A policy over the tokens of a VLA; see :meth:`act` and :meth:`evaluate`.

    The network stays in ``eval()`` mode: with dropout the first ratio would not be 1.

    Attributes:
        vla: The backend; what of its ``model`` has gradients is trained.
        value_head: Or None.
        temperature: Of drawing and of log-probabilities.
        stored_size: Side in pixels at which frames are kept.
    """

    def __init__(
        self,
        vla: TokenVLA,
        *,
        temperature: float = 1.0,
        value_head: ValueHead | None = None,
        value_through_trunk: bool = False,
    ) -> None:
        """Make a policy.

        Args:
            vla: A backend with a token head.
            temperature: Positive.
            value_head: None for GRPO.
            value_through_trunk: Whether the value loss also moves the VLA's network.

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
        self.value_through_trunk = value_through_trunk
        self.stored_size = int(getattr(vla, "input_size", vla.image_size))

    @property
    def horizon(self) -> int:
        """Control steps of a chunk."""
        return self.vla.horizon

    @property
    def needs_values(self) -> bool:
        """Whether there is a value head."""
        return self.value_head is not None

    def shrink(self, frames: Frames) -> Frames:
        """Return the camera images at the size at which the VLA sees and a rollout stores them."""
        if self.stored_size == self.vla.image_size:
            return {camera: frames[camera] for camera in CAMERAS}
        return {camera: area_downsample(frames[camera], self.stored_size) for camera in CAMERAS}

    @torch.no_grad()
    def act(
        self,
        frames: Frames,
        instructions: Sequence[str],
        proprio: np.ndarray,
        keys: np.ndarray | None = None,
    ) -> Act:
        """Choose chunks.

        Args:
            frames: Both cameras, (B, H, W, 3) uint8.
            instructions: B texts.
            proprio: (B, 8).
            keys: (B, k) integers; row i's draw is a function of ``keys[i]``. None: the most
                likely tokens.
        """
        hidden, logits = self.vla.token_outputs(frames, list(instructions), proprio)
        if keys is None:
            tokens = logits.argmax(dim=-1)
        else:
            uniform = keyed_uniform(keys, logits.shape[1:-1])
            tokens = draw_tokens(logits, uniform, self.temperature)
        query = self._query(hidden)
        return Act(
            tokens,
            _log_probs(logits, tokens, self.temperature),
            self.values_of(query, len(tokens)),
            self.vla.tokens_to_actions(tokens),
            None,
            torch.zeros(len(tokens), dtype=torch.bool),
            query,
        )

    @torch.no_grad()
    def query(
        self, frames: Frames, instructions: Sequence[str], proprio: np.ndarray
    ) -> Tensor | None:
        """Return the queries (B, H) of observations, None without a value head."""
        if self.value_head is None:
            return None
        return self._query(self.vla.token_outputs(frames, list(instructions), proprio).hidden)

    def values(self, frames: Frames, instructions: Sequence[str], proprio: np.ndarray) -> Tensor:
        """Return the values (B,) of observations; see :meth:`act`."""
        with torch.no_grad():
            return self.values_of(self.query(frames, instructions, proprio), len(instructions))

    def evaluate(
        self,
        frames: Frames,
        instructions: Sequence[str],
        proprio: np.ndarray,
        tokens: Tensor,
        teacher_tokens: Tensor | None = None,
    ) -> Evaluation:
        """Look at chunks that were executed, with gradients.

        Args:
            frames: As :meth:`act`.
            instructions: As :meth:`act`.
            proprio: As :meth:`act`.
            tokens: (B, C, 7) int64.
            teacher_tokens: (B, C, 7) int64, or None.
        """
        hidden, logits = self.vla.token_outputs(frames, list(instructions), proprio)
        query = self._query(hidden)
        return Evaluation(
            _log_probs(logits, tokens, self.temperature),
            entropy_of(logits, self.temperature),
            self.values_of(query, len(tokens)),
            None if teacher_tokens is None else _log_probs(logits, teacher_tokens, 1.0),
            logits.detach().argmax(dim=-1),
            query,
        )

    def values_of(self, query: Tensor | None, count: int) -> Tensor:
        """Return the values (count,) of queries (count, H); zeros without a value head."""
        if self.value_head is None or query is None:
            return torch.zeros(count, device=next(self.vla.model.parameters()).device)
        values: Tensor = self.value_head(query)
        return values

    def _query(self, hidden: Tensor) -> Tensor | None:
        if self.value_head is None:
            return None
        return (hidden[:, 0] if self.value_through_trunk else hidden[:, 0].detach()).float()

    # Parameters

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by name: ``vla.*`` and ``value_head.*``."""
        named = {
            f"vla.{name}": p for name, p in self.vla.model.named_parameters() if p.requires_grad
        }
        if self.value_head is not None:
            named |= {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}
        return named

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what is trained, on the CPU."""
        return {k: p.detach().cpu().clone() for k, p in self.named_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            ConfigError: If names or shapes differ.
        """
        mine = self.named_parameters()
        shapes = {k: tuple(p.shape) for k, p in mine.items()}
        theirs = {k: tuple(v.shape) for k, v in state.items()}
        if shapes != theirs:
            wrong = sorted(
                k for k in shapes.keys() | theirs.keys() if shapes.get(k) != theirs.get(k)
            )
            raise ConfigError(
                f"These parameters do not fit the policy; {len(wrong)} differ in name or shape: "
                f"{', '.join(wrong[:5])}."
            )
        for name, p in mine.items():
            p.copy_(state[name])

    def twin(self) -> TokenPolicy:
        """Return a policy with its own copy of what is trained; frozen weights are shared.

        For who acts while this one learns, and for a reference that stays: costs the memory of the
        trained parameters alone. Its parameters are changed by :meth:`follow` only.
        """
        shared: dict[int, Any] = {}
        for module in self._modules():
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.requires_grad:
                    shared[id(tensor)] = tensor
        for p in self.named_parameters().values():
            p.grad = None
        return copy.deepcopy(self, shared)

    @torch.no_grad()
    def follow(self, other: TokenPolicy) -> None:
        """Copy what is trained from the policy that this one is a :meth:`twin` of."""
        theirs = other.named_parameters()
        for name, p in self.named_parameters().items():
            p.copy_(theirs[name])

    def _modules(self) -> list[nn.Module]:
        modules: list[nn.Module] = [self.vla.model]
        return modules if self.value_head is None else [*modules, self.value_head]


def _log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    scaled = (logits.float() / temperature).log_softmax(dim=-1)
    return scaled.gather(-1, tokens[..., None]).squeeze(-1)
