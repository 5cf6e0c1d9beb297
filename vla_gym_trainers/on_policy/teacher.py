"""A frozen teacher, and who acts while the student takes over."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.policy import Act, Frames, TokenPolicy
from vla_gym_trainers.on_policy.sampling import keyed_uniform

_GRIPPER = 6
# Set apart the keys of choice and noise from those of the student's tokens.
_CHOICE, _NOISE = 1, 2


class Taught(NamedTuple):
    """A teacher's chunks.

    Attributes:
        actions: (B, C, 7) float32 in [-1, 1].
        tokens: (B, C, 7) int64, the nearest ones.
    """

    actions: Tensor
    tokens: Tensor


class Teacher:
    """A frozen VLA that acts greedily, with its own actions or its token head."""

    def __init__(self, vla: Any, head: str = "auto") -> None:
        """Make a teacher; it shares the network of ``vla``.

        Args:
            vla: A backend with ``actions_to_tokens``, which nobody trains.
            head: ``"l1"``: what ``infer`` returns (of a backend that has several heads, the
                regressed actions); ``"token"``: its most likely tokens; ``"auto"``: the first
                of them that there is.

        Raises:
            ConfigError: If ``head`` is something else, or the VLA lacks it.
        """
        if head not in ("auto", "l1", "token"):
            raise ConfigError(f"Expected head 'auto', 'l1' or 'token', got {head!r}.")
        wanted = "l1" if head == "auto" else head
        self.head, self.vla = wanted, vla
        if wanted != getattr(vla, "head", wanted):
            self.vla = copy.copy(vla)
            try:
                self.vla.head = wanted
            except ConfigError:
                if head != "auto":
                    raise
                self.head = "token"

    @torch.no_grad()
    def __call__(self, frames: Frames, instructions: Sequence[str], proprio: np.ndarray) -> Taught:
        """Choose chunks; see :meth:`TokenPolicy.act`."""
        texts = list(instructions)
        if self.head == "token":
            tokens = self.vla.token_outputs(frames, texts, proprio).logits.argmax(dim=-1)
            return Taught(self.vla.tokens_to_actions(tokens), tokens)
        actions = self.vla.infer(frames, texts, proprio).actions
        return Taught(actions, self.vla.actions_to_tokens(actions))


class MixedActor:
    """Plays the teacher's chunk with probability epsilon, else the student's.

    The teacher's tokens are recorded for every chunk, whoever played it: they are what cloning
    fits. With ``hybrid`` the teacher's actions are always executed, and their tokens are recorded
    with the student's log-probabilities as if the student had drawn them: the surrogate then moves
    the token head towards what turned out well.

    Attributes:
        policy: The student.
        needs_values: Whether it has a value head.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        teacher: Teacher,
        epsilon: float,
        *,
        noise: float = 0.0,
        hybrid: bool = False,
    ) -> None:
        """Make an actor.

        Args:
            policy: The student.
            teacher: The teacher.
            epsilon: Probability of a teacher's chunk, drawn for each chunk by its key.
            noise: Standard deviation of Gaussian noise on the teacher's executed actions (not on
                the gripper), so that the student sees states beside the teacher's path.
            hybrid: See the class; epsilon does not matter then.

        Raises:
            ConfigError: If a number is out of range.
        """
        if not 0.0 <= epsilon <= 1.0 or not noise >= 0.0:
            raise ConfigError(
                f"Expected epsilon in [0, 1] and noise >= 0, got {epsilon} and {noise}."
            )
        self.policy, self.teacher, self.epsilon = policy, teacher, epsilon
        self.noise, self.hybrid = noise, hybrid
        self.needs_values = policy.needs_values

    def shrink(self, frames: Frames) -> Frames:
        """Return the frames as they are stored."""
        return self.policy.shrink(frames)

    def values(self, frames: Frames, instructions: Sequence[str], proprio: np.ndarray) -> Tensor:
        """Return the student's values (B,)."""
        return self.policy.values(frames, instructions, proprio)

    @torch.no_grad()
    def act(
        self,
        frames: Frames,
        instructions: Sequence[str],
        proprio: np.ndarray,
        keys: np.ndarray | None = None,
    ) -> Act:
        """Choose chunks; without keys, the student's most likely tokens."""
        if keys is None:
            return self.policy.act(frames, instructions, proprio)
        inputs = frames, instructions, proprio
        taught = self.teacher(*inputs)
        played = self._noisy(taught.actions, keys)
        if self.hybrid:
            tokens = self.teacher.vla.actions_to_tokens(played)
            seen = self.policy.evaluate(*inputs, tokens)
            nobody = torch.zeros(len(tokens), dtype=torch.bool)
            return Act(
                tokens, seen.log_probs, seen.values, played, taught.tokens, nobody, seen.query
            )
        by_teacher = keyed_uniform(_with(keys, _CHOICE), ()) < self.epsilon
        if bool(by_teacher.all()):
            log_probs = torch.zeros(taught.tokens.shape)
            query = self.policy.query(*inputs)
            values = self.policy.values_of(query, len(log_probs))
            return Act(taught.tokens, log_probs, values, played, taught.tokens, by_teacher, query)
        own = self.policy.act(*inputs, keys)
        here = by_teacher.to(own.tokens.device)[:, None, None]
        return Act(
            torch.where(here, taught.tokens, own.tokens),
            torch.where(here, 0.0, own.log_probs),
            own.values,
            torch.where(here, played, own.actions),
            taught.tokens,
            by_teacher,
            own.query,
        )

    def _noisy(self, actions: Tensor, keys: np.ndarray) -> Tensor:
        if self.noise == 0.0:
            return actions
        shape = tuple(actions.shape[1:])
        rows = [np.random.default_rng(k).standard_normal(shape) for k in _with(keys, _NOISE)]
        noise = self.noise * torch.from_numpy(np.stack(rows)).to(actions)
        noise[..., _GRIPPER] = 0.0
        return (actions + noise).clamp(-1.0, 1.0)


def _with(keys: np.ndarray, tag: int) -> np.ndarray:
    return np.concatenate([keys, np.full((len(keys), 1), tag)], axis=1)
