"""PPO on the RL-token actor: a Gaussian over corrections of the frozen VLA's chunk.

The policy draws the correction, not the chunk: ``c ~ N(mu(x, a~), sigma^2)`` in the actor's K
functions of time, ``a = clip(a~ + s * sum_k c_k phi_k)``. So it explores in motions that last a
whole chunk, and a log-probability has N K terms, N the size of an action. At the start mu is 0:
the VLA plus noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla_gym.errors import WeightsError
from vla_gym.suites import get_suite
from vla_gym.suites.libero.spec import ACTION, PROPRIO
from vla_gym.wrappers.vla_features import look
from vla_gym_trainers.networks import (
    ChunkActor,
    FeatureNormalizer,
    reference_chunk,
)
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup, local_device
from vla_gym_trainers.on_policy.distributions import GaussianChunk
from vla_gym_trainers.on_policy.phases import TeacherChunk
from vla_gym_trainers.on_policy.policy import Observation, Policy, ValueHead
from vla_gym_trainers.on_policy.rollout import Rollout

WEIGHTS, SIZES = "rl_token_actor.safetensors", "rl_token_actor.json"


class RLTokenActor(nn.Module):
    """Normaliser, actor and sigma: what is saved of a policy, and what plays greedily.

    Attributes:
        sizes: Arguments that make it.
        action_space: Of what it plays.
        observation_space: What it looks at.
        guarded_tasks: None: it plays all tasks itself.
        log_std: (N,) logarithm of sigma, per action dimension.
    """

    def __init__(
        self,
        token_dim: int,
        chunk_len: int,
        net_arch: Sequence[int] = (256, 256),
        residual_scale: float = 1.0,
        residual_basis: int = 2,
        sigma: float = 0.05,
        *,
        proprio_dim: int = PROPRIO.size,
        action_scale: Sequence[float] = ACTION.scales,
    ) -> None:
        """Begin at the VLA; see ``PPOConfig`` and, for ``action_scale``, ``ActionSpec.scale``."""
        super().__init__()
        self.sizes: dict[str, Any] = {
            "token_dim": token_dim,
            "chunk_len": chunk_len,
            "net_arch": list(net_arch),
            "residual_scale": residual_scale,
            "residual_basis": residual_basis,
            "proprio_dim": proprio_dim,
            "action_scale": list(action_scale),
        }
        self.action_space = spaces.Box(-1.0, 1.0, (chunk_len, len(action_scale)), np.float32)
        self.observation_space = spaces.Dict(
            {
                "rl_token": spaces.Box(-np.inf, np.inf, (token_dim,), np.float32),
                "vla_action": self.action_space,
                "proprio": spaces.Box(-np.inf, np.inf, (proprio_dim,), np.float32),
            }
        )
        self.guarded_tasks: tuple[int, ...] = ()
        self.normalizer = FeatureNormalizer(token_dim, proprio_dim)
        limit = residual_scale * torch.tensor(action_scale, dtype=torch.float32)
        self.actor = ChunkActor(
            self.normalizer.state_dim, chunk_len, net_arch, limit, residual_basis
        )
        self.log_std = nn.Parameter(torch.full((len(action_scale),), math.log(sigma)))

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the mean corrections (B, K, N) of features (``rl_token``, ...)."""
        return self.actor.coefficients(self.normalizer(observation), reference_chunk(observation))

    def chunk(self, correction: Tensor, reference: Tensor) -> Tensor:
        """Return the chunks (B, C, N) that corrections (B, K, N) make of the VLA's, the same."""
        return self.actor.chunk(correction, reference.flatten(1)).reshape(reference.shape)

    @torch.no_grad()
    def predict(
        self,
        observation: Mapping[str, np.ndarray],
        state: None = None,  # noqa: ARG002
        episode_start: None = None,  # noqa: ARG002
        deterministic: bool = True,  # noqa: ARG002
    ) -> tuple[np.ndarray, None]:
        """Return the mean chunks (B, C, N) in [-1, 1], called as the policies of SB3 are.

        Args:
            observation: As ``LiberoVLA-*`` has it, one row (no leading dimension) or B.
            state: Not used.
            episode_start: Not used.
            deterministic: Not used: it never draws.
        """
        names = ("rl_token", "proprio", "vla_action")
        tensors = {name: torch.as_tensor(np.asarray(observation[name])) for name in names}
        if single := tensors["proprio"].ndim == 1:
            tensors = {name: tensor[None] for name, tensor in tensors.items()}
        chunks = self.chunk(self(tensors), tensors["vla_action"]).numpy()
        return (chunks[0] if single else chunks), None

    def save(self, folder: Path) -> None:
        """Write the weights, and the sizes that :meth:`load` makes it with."""
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / WEIGHTS)
        (folder / SIZES).write_text(json.dumps(self.sizes) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RLTokenActor:
        """Read what :meth:`save` wrote, on the CPU.

        Raises:
            WeightsError: If a file is missing or damaged.
        """
        try:
            actor = cls(**json.loads((folder / SIZES).read_text(encoding="utf-8")))
            actor.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise WeightsError(f"{folder} holds no whole RL-token actor: {error}") from error
        return actor.eval()


class FeatureValue(nn.Module):
    """Value of a state, read off its RL token and proprio by a normaliser and a value head."""

    def __init__(self, normalizer: FeatureNormalizer) -> None:
        super().__init__()
        self.normalizer, self.head = normalizer, ValueHead(normalizer.state_dim)

    def forward(self, value_input: Tensor) -> Tensor:
        """Map (B, D + P) to values (B,)."""
        size = self.normalizer.token_dim
        features = {"rl_token": value_input[:, :size], "proprio": value_input[:, size:]}
        values: Tensor = self.head(self.normalizer(features))
        return values


class RLTokenPPOPolicy(Policy):
    """A Gaussian policy on what a frozen VLA makes of the observations.

    Attributes:
        vla: The frozen VLA.
        encoder: Of the RL token; None for the mean hidden state.
        actor: What is trained.
        min_log_std: Lower bound of the log-standard deviations.
    """

    def __init__(
        self,
        vla: Any,
        encoder: Any,
        actor: RLTokenActor,
        *,
        min_sigma: float = 0.01,
        with_values: bool = True,
    ) -> None:
        """Put a policy together; the networks are used as they are."""
        self.vla, self.encoder, self.actor = vla, encoder, actor
        self.min_log_std = math.log(min_sigma)
        device = actor.log_std.device
        self.value_head = FeatureValue(actor.normalizer).to(device) if with_values else None
        token_dim, proprio_dim = actor.sizes["token_dim"], actor.sizes["proprio_dim"]
        chunk_shape = actor.action_space.shape
        self.observation = {
            "rl_token": ((token_dim,), torch.float32),
            "vla_action": (chunk_shape, torch.float32),
            "proprio": ((proprio_dim,), torch.float32),
            "task_id": ((), torch.int64),
        }
        self.factors = (len(actor.actor.basis), chunk_shape[1])
        self.sample = self.factors, torch.float32
        self.value_size, self.image_size = token_dim + proprio_dim, vla.image_size

    @classmethod
    def make(cls, config: OnPolicyConfig, vla: Any, chunk_len: int) -> RLTokenPPOPolicy:
        """Make an untrained one.

        Raises:
            ConfigError: If the encoder does not fit the VLA.
        """
        from vla_gym.rl_token import choose_rl_token

        device = local_device(config.device)
        encoder = choose_rl_token(config.rl_token, vla, device)
        token_dim = vla.hidden_size if encoder is None else encoder.dim
        suite = get_suite(config.suite)
        actor = RLTokenActor(
            token_dim,
            chunk_len,
            config.net_arch,
            config.residual_scale,
            config.residual_basis,
            config.sigma,
            proprio_dim=suite.proprio.size,
            action_scale=suite.action.scales,
        ).to(device)
        with_values = isinstance(config, PPOConfig)
        return cls(vla, encoder, actor, min_sigma=config.min_sigma, with_values=with_values)

    def observe(self, observation: Mapping[str, np.ndarray], texts: Sequence[str]) -> Observation:
        """Run the VLA: return its RL token and chunk, proprio and task."""
        proprio = np.array(observation["proprio"], np.float32)
        frames = {key: value for key, value in observation.items() if value.ndim == 4}
        chunk_len = self.actor.sizes["chunk_len"]
        token, chunk = look(self.vla, self.encoder, chunk_len, frames, list(texts), proprio)
        return {
            "rl_token": token,
            "vla_action": chunk,
            "proprio": proprio,
            "task_id": np.array(observation["task_id"], np.int64),
        }

    def distribution(
        self,
        observation: Observation,
        instructions: Sequence[str],  # noqa: ARG002
    ) -> tuple[GaussianChunk, Tensor | None]:
        """Return the normal distribution of the correction."""
        names = ("rl_token", "proprio", "vla_action")
        tensors = {name: torch.as_tensor(observation[name]).to(self.device) for name in names}
        value_input = None
        if self.value_head is not None:
            value_input = torch.cat([tensors["rl_token"], tensors["proprio"]], dim=1)
        return GaussianChunk(self.actor(tensors), self.actor.log_std), value_input

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

    def begin(self, rollout: Rollout, group: ProcessGroup) -> None:
        """Set the normaliser's statistics by the first rollout, those of process 0 in all."""
        valid, normalizer = rollout.data["valid"], self.actor.normalizer
        seen = (rollout.data[key][valid].to(self.device) for key in ("rl_token", "proprio"))
        normalizer.fit(*seen)
        group.broadcast(list(normalizer.buffers()))

    def save(self, folder: Path) -> None:
        """Write the actor, as ``vla-gym eval --policy`` takes it."""
        self.actor.save(folder)


def vla_chunks(observation: Observation, instructions: Sequence[str]) -> TeacherChunk:  # noqa: ARG001
    """Return the frozen VLA's own chunks, for validation to compare with; the correction is 0."""
    actions = torch.as_tensor(observation["vla_action"])
    return TeacherChunk(actions, torch.zeros_like(actions))
