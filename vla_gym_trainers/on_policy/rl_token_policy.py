"""PPO on the RL-token actor: a Gaussian over corrections of the frozen VLA's chunk.

The policy draws the correction, not the chunk: ``c ~ N(mu(x, a~), sigma^2)`` in the actor's K
functions of time, ``a = clip(a~ + s * sum_k c_k phi_k)``. So it explores in motions that last a
whole chunk, and a log-probability has N K terms, N the size of an action. At the start mu is 0:
the VLA plus noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from vla_gym.suites import get_suite
from vla_gym.vla.base import FrozenVLA
from vla_gym.wrappers.vla_features import look
from vla_gym_trainers.networks import FeatureNormalizer
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup, local_device
from vla_gym_trainers.on_policy.distributions import GaussianChunk
from vla_gym_trainers.on_policy.phases import TeacherChunk
from vla_gym_trainers.on_policy.policy import Observation, Policy, ValueHead
from vla_gym_trainers.on_policy.recurrence import recompute
from vla_gym_trainers.on_policy.rl_token_actor import ActorSizes, RLTokenActor
from vla_gym_trainers.rollout.memory import MEMORY
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY


class FeatureValue(nn.Module):
    """Value of a state, read off what the actor sees and its memory by a normaliser and a head."""

    def __init__(self, normalizer: FeatureNormalizer, memory_size: int) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.head = ValueHead(normalizer.state_dim + memory_size)

    def forward(self, value_input: Tensor) -> Tensor:
        """Map the normaliser's inputs and the memory, side by side in (B, H), to values (B,)."""
        end = len(self.normalizer.mean)
        parts = value_input[:, :end].split(self.normalizer.sizes, dim=1)
        features = dict(zip(self.normalizer.inputs, parts, strict=True))
        return self.head(torch.cat([self.normalizer(features), value_input[:, end:]], dim=1))


class RLTokenPPOPolicy(Policy):
    """A Gaussian policy on what a frozen VLA makes of the observations.

    Attributes:
        vla: The frozen VLA.
        encoder: Of the RL token; None for the mean hidden state.
        actor: What is trained.
        min_log_std: Lower bound of the log-standard deviations.
    """

    def __init__(
        self, config: OnPolicyConfig, vla: Any, chunk_len: int, world_memory_size: int = 0
    ) -> None:
        """Make an untrained one; ``world_memory_size`` 0: there is no world model.

        Raises:
            ConfigError: If the encoder does not fit the VLA.
        """
        from vla_gym.rl_token import choose_rl_token

        device = local_device(config.device)
        self.vla, self.encoder = vla, choose_rl_token(config.rl_token, vla, device)
        suite = get_suite(config.suite)
        sizes = ActorSizes(
            token_dim=vla.hidden_size if self.encoder is None else self.encoder.dim,
            chunk_len=chunk_len,
            net_arch=list(config.net_arch),
            residual_scale=config.residual_scale,
            residual_basis=config.residual_basis,
            proprio_dim=suite.proprio.size,
            action_scale=list(suite.action.scales),
            memory_size=config.memory_size,
            world_memory_size=world_memory_size,
        )
        self.actor = actor = RLTokenActor(sizes, config.sigma).to(device)
        self.min_log_std, self.memory_size = math.log(config.min_sigma), actor.memory_size
        self.value_head = None
        if isinstance(config, PPOConfig):
            self.value_head = FeatureValue(actor.normalizer, self.memory_size).to(device)
        seen = actor.observation_space.items()
        shapes = {name: box.shape or () for name, box in seen} | actor.carried
        self.observation = {name: (shape, torch.float32) for name, shape in shapes.items()}
        self.observation["task_id"] = (), torch.int64
        self.factors = (len(actor.actor.basis), actor.action_space.shape[1])
        self.sample = self.factors, torch.float32
        self.value_size = sum(actor.normalizer.sizes) + self.memory_size
        self.image_size = vla.image_size

    def observe(
        self,
        observation: Mapping[str, np.ndarray],
        texts: Sequence[str],
        vla: FrozenVLA | None = None,
    ) -> Observation:
        """Run the VLA: return its RL token and chunk, proprio and task."""
        proprio = np.array(observation["proprio"], np.float32)
        frames = {name: observation[name] for name in self.vla.cameras}
        chunk_len = self.actor.sizes.chunk_len
        vla = self.vla if vla is None else vla
        token, chunk = look(vla, self.encoder, chunk_len, frames, list(texts), proprio)
        seen = {
            "rl_token": token,
            "vla_action": chunk,
            "proprio": proprio,
            "task_id": np.array(observation["task_id"], np.int64),
        }
        if WORLD_MEMORY in self.observation:
            seen[WORLD_MEMORY] = np.array(observation[WORLD_MEMORY], np.float32)
        return seen

    def _tensors(self, observation: Observation) -> dict[str, Tensor]:
        names = (*self.actor.normalizer.inputs, "vla_action", *self.carried)
        return {name: torch.as_tensor(observation[name]).to(self.device) for name in names}

    def remember(self, observation: Observation) -> Tensor | None:
        """Return the memory after observations."""
        return self.actor.remember(self._tensors(observation)) if self.memory_size else None

    def distribution(
        self,
        observation: Observation,
        instructions: Sequence[str],  # noqa: ARG002
    ) -> tuple[GaussianChunk, Tensor | None]:
        """Return the normal distribution of the correction.

        The value loss trains the memory as well, also while the value head learns alone else.
        """
        tensors = self._tensors(observation)
        correction, memory = self.actor(tensors)
        value_input = None
        if self.value_head is not None:
            seen = [tensors[name] for name in self.actor.normalizer.inputs]
            value_input = torch.cat([*seen, memory], dim=1)
        return GaussianChunk(correction, self.actor.log_std), value_input

    def actions(self, sample: Tensor, observation: Observation) -> Tensor:
        """Return the corrected chunks."""
        reference = torch.as_tensor(observation["vla_action"]).to(sample.device)
        return self.actor.chunk(sample, reference)

    def factor_mask(self, executed: Tensor) -> Tensor:
        """Every coefficient takes part in every control step."""
        return torch.ones(len(executed), *self.factors, dtype=torch.bool)

    def networks(self) -> dict[str, nn.Module]:
        """Return the actor."""
        return {"actor": self.actor}

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and the normaliser's statistics."""
        statistics = self.actor.normalizer.named_buffers()
        named = {f"actor.normalizer.{name}": buffer for name, buffer in statistics}
        return {**named, **self.named_parameters()}

    @torch.no_grad()
    def bound(self) -> None:
        """Keep sigma above its floor."""
        self.actor.log_std.clamp_(min=self.min_log_std)

    def begin(self, data: TensorDict, group: ProcessGroup) -> None:
        """Set the normaliser's statistics by the first rollout, those of process 0 in all.

        What the data says was remembered is replaced by what would have been with them.
        """
        valid, normalizer = data["valid"], self.actor.normalizer
        seen = {key: data[key][valid].to(self.device) for key in normalizer.inputs}
        normalizer.fit(seen)
        group.broadcast(list(normalizer.buffers()))
        if self.memory_size:
            data[MEMORY].copy_(recompute(self, data))


def vla_chunks(observation: Observation, instructions: Sequence[str]) -> TeacherChunk:  # noqa: ARG001
    """Return the frozen VLA's own chunks, for validation to compare with; the correction is 0."""
    actions = torch.as_tensor(observation["vla_action"])
    return TeacherChunk(actions, torch.zeros_like(actions))
