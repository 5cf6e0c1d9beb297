"""From a frozen teacher's behaviour to reinforcement learning, by control steps played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_gym.rollout.vla_policy import load_vla
from vla_gym.vla.base import GRIPPER
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributions import keyed_normal, keyed_uniform
from vla_gym_trainers.on_policy.formulas import per_factor
from vla_gym_trainers.on_policy.policy import Act, Observation, Policy

# Set apart the keys of choice and noise from those of the student's samples.
_CHOICE, _NOISE = 1, 2


@dataclass(frozen=True)
class Phase:
    """What is done at one time: who acts, and what is learnt from a rollout.

    Attributes:
        name: ``"warmup"``, ``"transition"``, ``"value"`` or ``"rl"``.
        epsilon: Probability that a chunk is the teacher's.
        rl: Whether the surrogate, entropy and KL losses take part.
        value: Whether the value loss does, if there is a value head.
        cloning: Weight of the cross-entropy to the teacher's samples.
        epochs: In place of the configuration's.
        num_minibatches: In place of the configuration's.
        learning_rate: In place of the configuration's.
        rate_share: What all learning rates are multiplied by.
        noise_share: See :class:`~vla_gym_trainers.on_policy.policy.Policy`.
    """

    name: str = "rl"
    epsilon: float = 0.0
    rl: bool = True
    value: bool = True
    cloning: float = 0.0
    epochs: int | None = None
    num_minibatches: int | None = None
    learning_rate: float | None = None
    rate_share: float = 1.0
    noise_share: float | None = None


def phase_at(config: OnPolicyConfig, steps: int) -> Phase:
    """Return what is done once so many control steps have been played.

    Until ``warmup_steps`` the teacher acts and the student clones it. During the following
    ``transition_steps`` epsilon falls linearly from 1 to 0, the weight of cloning with it, and
    the student's own chunks are reinforced. Then there is reinforcement learning alone, in PPO
    once ``value_warmup_steps`` are over: before, the value head alone learns. The learning rates
    and the noise fall all along.
    """
    done = min(steps / config.total_steps, 1.0)
    rate = 1.0 - (1.0 - config.learning_rate_end) * done
    noise = None if config.noise_end is None else config.noise_end**done
    return replace(_phase_at(config, steps), rate_share=rate, noise_share=noise)


def _phase_at(config: OnPolicyConfig, steps: int) -> Phase:
    if steps < config.warmup_steps:
        return Phase(
            "warmup",
            1.0,
            rl=False,
            cloning=config.cloning_coef,
            epochs=config.cloning_epochs,
            num_minibatches=config.cloning_minibatches,
            learning_rate=config.cloning_learning_rate,
        )
    past = steps - config.warmup_steps
    if past < config.transition_steps:
        epsilon = 1.0 - past / config.transition_steps
        return Phase("transition", epsilon, cloning=config.cloning_coef * epsilon)
    if isinstance(config, PPOConfig) and steps < config.value_warmup_steps:
        return Phase("value", rl=False)
    return Phase()


class TeacherChunk(NamedTuple):
    """A teacher's chunks.

    Attributes:
        actions: (B, C, 7) float32 in [-1, 1].
        sample: (B, ...) the student's samples that are nearest to them.
    """

    actions: Tensor
    sample: Tensor


#: Who teaches and whom validation compares with, greedily; it never changes.
Teacher = Callable[[Observation, Sequence[str]], TeacherChunk | Act]


class VLATeacher:
    """A frozen VLA that acts greedily, with its own actions or its token head."""

    def __init__(self, vla: Any, head: Literal["auto", "l1", "token"] = "auto") -> None:
        """Make a teacher that shares the network of ``vla``, which has ``actions_to_tokens``.

        It acts by its ``head``: ``"l1"``: what ``infer`` returns (of a backend that has several
        heads, the regressed actions); ``"token"``: its most likely tokens; ``"auto"``: the first of
        them that there is.

        Raises:
            ConfigError: If the VLA lacks it.
        """
        if head == "auto":
            head = "l1" if "l1" in vla.heads else "token"
        self.head = head
        self.vla: Any = vla if head == vla.head else load_vla(vla, head)

    @torch.no_grad()
    def __call__(self, observation: Observation, instructions: Sequence[str]) -> TeacherChunk:
        """Choose chunks; see :meth:`Policy.act`."""
        frames = {camera: observation[camera] for camera in self.vla.cameras}
        inputs = frames, list(instructions), observation["proprio"]
        if self.head == "token":
            tokens = self.vla.token_outputs(*inputs).logits.argmax(dim=-1)
            return TeacherChunk(self.vla.tokens_to_actions(tokens), tokens)
        actions = self.vla.infer(*inputs).actions
        return TeacherChunk(actions, self.vla.actions_to_tokens(actions))


@dataclass(frozen=True)
class MixedActor:
    """Plays the teacher's chunk with probability epsilon, else the student's.

    The teacher's samples are recorded for every chunk, whoever played it: they are what cloning
    fits.

    Attributes:
        policy: The student.
        teacher: The teacher.
        epsilon: Probability of a teacher's chunk, drawn for each chunk by its key.
        noise: Standard deviation of Gaussian noise on the teacher's executed actions (not on the
            gripper), so that the student sees states beside the teacher's path.
    """

    policy: Policy
    teacher: VLATeacher
    epsilon: float
    noise: float = 0.0

    @torch.no_grad()
    def act(self, observation: Observation, instructions: Sequence[str], keys: np.ndarray) -> Act:
        """Choose chunks, by the keys of their draws."""
        inputs = observation, instructions
        taught = self.teacher(*inputs)
        played = self._noisy(taught.actions, keys)
        by_teacher = keyed_uniform(_with(keys, _CHOICE), ()) < self.epsilon
        own = self.policy.act(*inputs, keys)

        def either(theirs: Tensor | float, mine: Tensor) -> Tensor:
            return torch.where(per_factor(by_teacher.to(mine.device), mine), theirs, mine)

        return own._replace(
            sample=either(taught.sample, own.sample),
            log_probs=either(0.0, own.log_probs),
            actions=either(played, own.actions),
            teacher_sample=taught.sample,
            by_teacher=by_teacher,
            next_memory=None,
        )

    def _noisy(self, actions: Tensor, keys: np.ndarray) -> Tensor:
        if self.noise == 0.0:
            return actions
        noise = self.noise * keyed_normal(_with(keys, _NOISE), actions.shape[1:]).to(actions)
        noise[..., GRIPPER] = 0.0
        return (actions + noise).clamp(-1.0, 1.0)


def _with(keys: np.ndarray, tag: int) -> np.ndarray:
    return np.concatenate([keys, np.full((len(keys), 1), tag)], axis=1)


#: Who acts while a rollout is collected.
Actor = Policy | MixedActor
